# Sourced by the tests of the steps: writes 1 if the file holds the expected word.
score() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; echo $((1 - $?)) > /logs/verifier/reward.txt; }
