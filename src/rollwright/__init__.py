"""rollwright: agentic-RL rollouts, from a laptop to a cluster to a swarm."""

__version__ = "0.1.0"
