#!/bin/bash
[ "$(cat /answer 2>/dev/null)" = "$EXPECTED" ] && [ ! -e /not-copied ] && [ ! -e /data/left.tmp ] &&
  [ "$(cat /data/collected /data/note /logs/artifacts/published | tr '\n' ' ')" = "collected note published " ]
echo $((1 - $?)) > /logs/verifier/reward.txt
