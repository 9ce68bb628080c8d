"""The supervisor of a node: watches its progress, restarts it, and logs what happened."""
