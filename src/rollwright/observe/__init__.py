"""Figures about runs. Reads what the other boxes record; only the command line imports it."""
