#!/bin/bash
{ echo $COLOR; cat given.txt made.txt; } > all.txt
