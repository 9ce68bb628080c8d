#!/bin/bash
touch /etc/written 2>/dev/null && did=written || did=refused
echo "$(id -un) $(id -u) $did" > /tmp/who
echo "may write logs" > /logs/agent/note
