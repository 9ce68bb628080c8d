"""Workers: they claim rollouts from a store and play them."""

from rollwright.workers.worker import Worker, WorkerSettings

__all__ = ["Worker", "WorkerSettings"]
