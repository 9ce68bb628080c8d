#!/bin/bash
echo a >> /answer
