#!/bin/bash
echo about to break
no-such-program && echo 1 > /logs/verifier/reward.txt
