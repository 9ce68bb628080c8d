"""A run: its parts put together from a configuration, and the folder its results go to."""
