"""Environments, selected by tag; see `rollwright.envs.registry`."""
