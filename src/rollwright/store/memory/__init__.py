"""The store in memory: for tests, notebooks, and runs that need not outlive their process."""

from rollwright.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]
