#!/bin/bash
echo 7 > /logs/verifier/reward.txt
if [ -e /answer ]; then echo '{"reward": 0.75, "speed": 3}'; else echo '{"reward": 0.25, "speed": 0}'; fi > /logs/verifier/reward.json
exit 1
