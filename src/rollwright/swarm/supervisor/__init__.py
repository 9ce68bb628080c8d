"""Keeping one node at work: watching its progress, starting it again, and saying what happened."""
