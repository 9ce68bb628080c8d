#!/bin/bash
[ "$(cat /answer 2>/dev/null)" = "$EXPECTED fallback solved" ] && [ "$PLAIN" = 'x${ROLLWRIGHT_TEST_KEY}' ] && [ -z "$SOLVED" ]
echo $((1 - $?)) > /logs/verifier/reward.txt
