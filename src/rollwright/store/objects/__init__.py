"""Trajectories as objects beside their rows: in a folder, or in anything that fsspec reaches."""

from rollwright.store.objects.store import ObjectBackedStore

__all__ = ["ObjectBackedStore"]
