#!/bin/bash
[ "$(cat /answer 2>/dev/null | tr '\n' ' ')" = "a b " ]; echo $((1 - $?)) > /logs/verifier/reward.txt
