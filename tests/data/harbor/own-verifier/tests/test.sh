#!/bin/bash
[ "$(cat /answer 2>/dev/null)" = "$(cat /right)" ] && [ ! -e /tests/Dockerfile ]
echo $((1 - $?)) > /logs/verifier/reward.txt
