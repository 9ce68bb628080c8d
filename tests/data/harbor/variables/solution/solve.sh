#!/bin/bash
echo "$KEY $OTHER $SOLVED" > /answer
