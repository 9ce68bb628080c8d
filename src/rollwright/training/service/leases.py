"""Who trains the batch that is offered: one trainer at a time, under a lease. Pure; times are the caller's.

Always true: a batch is acknowledged once, by the trainer that holds it. A lease that ran out or was given back acknowledges
nothing, also if nobody else has taken the batch. The same acknowledgement again is answered as the first was.
"""

from dataclasses import dataclass, replace
from math import inf


class LeaseLost(Exception):
    """The lease is not, or no longer, that of the offered batch."""


@dataclass(frozen=True)
class BatchLease:
    """One trainer's right to train one batch."""

    id: str
    step: int
    """Number of the batch, from 0."""
    trainer: str
    expires: float


class BatchLeases:
    """The lease of the batch that is offered now, and those of finished ones."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.step: int | None = None
        """Number of the offered batch; `None`: there is none."""
        self.held: BatchLease | None = None
        self.lost = 0
        """Leases that ran out."""
        self._finished: dict[str, int] = {}
        """Steps of finished leases."""

    def offer(self, step: int, held: BatchLease | None = None) -> None:
        """`held`: the lease under which an earlier process had handed this batch out."""
        self.step, self.held = step, held

    def take(self, id: str, trainer: str, now: float) -> BatchLease | None:
        """Takes the offered batch; `None` if there is none, or another trainer has it."""
        self.expire(now)
        if self.step is None or self.held is not None:
            return None
        self.held = BatchLease(id, self.step, trainer, now + self.seconds)
        return self.held

    def renew(self, id: str, now: float) -> BatchLease:
        self.held = replace(self._holder(id, now), expires=now + self.seconds)
        return self.held

    def release(self, id: str, now: float) -> None:
        """Gives the batch back, for the next trainer."""
        self._holder(id, now)
        self.held = None

    def pin(self, id: str, now: float) -> BatchLease:
        """Keeps the lease for as long as its acknowledgement is examined; `renew` ends that."""
        self.held = replace(self._holder(id, now), expires=inf)
        return self.held

    def take_back(self, trainer: str) -> None:
        """Ends the lease of a trainer that asks again: it was restarted, or the batch did not reach it."""
        if trainer and self.held is not None and self.held.trainer == trainer and self.held.expires < inf:
            self.held = None

    def finish(self, id: str, now: float) -> BatchLease:
        found = self._holder(id, now)
        self.remember(found)
        self.step = self.held = None
        return found

    def remember(self, lease: BatchLease) -> None:
        """Notes a finished lease; one step's is enough to answer a repeated acknowledgement."""
        self._finished = {lease.id: lease.step}

    def finished_step(self, id: str) -> int | None:
        """The step that this lease has finished, if it was the last one."""
        return self._finished.get(id)

    def expire(self, now: float) -> None:
        if self.held is not None and self.held.expires <= now:
            self.held = None
            self.lost += 1

    def _holder(self, id: str, now: float) -> BatchLease:
        self.expire(now)
        if self.held is None or self.held.id != id:
            raise LeaseLost(
                "this lease does not hold the offered batch: it ran out, was given back, or is of an earlier batch"
            )
        return self.held
