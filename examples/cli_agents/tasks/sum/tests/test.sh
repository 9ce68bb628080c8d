#!/bin/sh
if [ "$(cat /srv/sum 2>/dev/null)" = 36 ] && [ "$(wc -l < /srv/numbers)" = 8 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
