"""Environments, found by tag: see `rollwright.envs.registry`."""
