#!/bin/bash
echo 42 > /answer
exit 3
