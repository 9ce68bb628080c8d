"""Bridges to the trainers of other projects: a common conversion of trajectories, and one module for each trainer."""

from rollwright.training.bridges.completions import Completion, completion_of

__all__ = ["Completion", "completion_of"]
