"""Rollouts for trainers of other projects: one adapter from trajectories to what they eat, one module for each."""

from rollwright.training.bridges.completions import Completion, completion_of

__all__ = ["Completion", "completion_of"]
