#!/bin/bash
. /tests/expect.sh
score /tmp/who "wrong"
