#!/bin/bash
echo one > /tmp/word
