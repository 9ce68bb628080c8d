#!/bin/bash
[ "$(cat /tmp/who 2>/dev/null)" = "agent 1000 refused" ] && [ "$(id -un)" = root ]
echo $((1 - $?)) > /logs/verifier/reward.txt
