"""Batches for a trainer in another process, machine or language, over HTTP; weights come back the same way."""
