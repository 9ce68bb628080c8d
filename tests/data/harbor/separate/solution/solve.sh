#!/bin/bash
mkdir -p /data
echo 42 > /answer
echo 1 > /not-copied
echo note > /data/note
echo left > /data/left.tmp
echo published > /logs/artifacts/published
