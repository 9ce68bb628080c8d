"""What is wrong with this machine, this configuration or this node, and what to do about it."""
