"""The errors that a store raises, the same ones from every backend and over HTTP."""

from rollwright.errors import RollwrightError


class StoreUnavailable(RollwrightError):
    """The store did not answer, and retries did not help; the call may or may not have been executed."""


class StoreError(RollwrightError):
    """The store rejects a call; nothing was changed."""


class StoreDamaged(StoreError):
    """The store's file or database is corrupt, or not a store at all; a retry does not help."""


class NotFound(StoreError):
    """No rollout, attempt, worker or resource has that id."""


class AttemptRefused(StoreError):
    """The attempt does not hold the rollout any more: its lease expired, or the rollout was cancelled."""


class ImpossibleChange(StoreError):
    """The status cannot change that way."""
