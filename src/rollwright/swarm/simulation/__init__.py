"""A swarm of any size in one process and in virtual time: the real exchange over a simulated network."""
