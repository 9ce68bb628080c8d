"""Diagnosis of a machine, a configuration and a swarm node, with remedies."""
