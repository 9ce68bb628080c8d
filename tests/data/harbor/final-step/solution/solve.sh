#!/bin/bash
echo b >> /answer
