#!/bin/bash
[ "$(cat all.txt 2>/dev/null | tr '\n' ' ')" = "red given built " ] && [ "$(cat /tests/of-the-image)" = kept ] && [ "$(pwd)" = /work ]
echo $((1 - $?)) > /logs/verifier/reward.txt
