#!/bin/bash
. /tests/expect.sh
score /tmp/word "${EXPECTED:-one}"
