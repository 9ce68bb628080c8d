"""Agents on the command line, such as Claude Code: a recipe for each, installed once and run in the attempt's box."""
