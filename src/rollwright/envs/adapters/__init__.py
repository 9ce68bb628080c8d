"""Environments of other packages, and tools as an environment."""
