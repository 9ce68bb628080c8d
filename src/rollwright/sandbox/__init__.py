"""Sandboxes: untrusted Python code in confined processes."""
