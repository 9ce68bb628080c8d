"""The dequeues that wait, in the order of asking.

Whatever happens, a call of this costs the same however many stand in the line: joining, leaving from anywhere, and
being served look at nobody else. A claim id stands in it once: who asks again under the same id lost the connection
that asked before, and that one is let go.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from rollwright.store.memory.rows import AttemptRow
from rollwright.store.waiting import resolve


@dataclass(eq=False, slots=True)
class Claimant:
    """A `dequeue` that waits."""

    limit: int
    worker_id: str | None
    claim_id: str | None
    future: "asyncio.Future[None]"
    attempts: list[AttemptRow] = field(default_factory=list)


class Line:
    def __init__(self) -> None:
        self._waiting: OrderedDict[Claimant, None] = (
            OrderedDict()
        )  # a dict's first key is dear after deletions
        self._by_claim: dict[str, Claimant] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, claimant: Claimant) -> None:
        if claimant.claim_id is not None:
            earlier = self._by_claim.get(claimant.claim_id)
            if earlier is not None:
                self.leave(earlier)
                resolve(earlier.future)
            self._by_claim[claimant.claim_id] = claimant
        self._waiting[claimant] = None

    def leave(self, claimant: Claimant) -> None:
        """Also for one that has left already."""
        self._waiting.pop(claimant, None)
        self._forget(claimant)

    def next(self) -> Claimant | None:
        """Takes out the first that still waits."""
        while self._waiting:
            claimant, _ = self._waiting.popitem(last=False)
            self._forget(claimant)
            if not claimant.future.done():
                return claimant
        return None

    def dissolve(self) -> None:
        """Lets everybody go with nothing."""
        while (claimant := self.next()) is not None:
            resolve(claimant.future)

    def _forget(self, claimant: Claimant) -> None:
        if claimant.claim_id is not None and self._by_claim.get(claimant.claim_id) is claimant:
            del self._by_claim[claimant.claim_id]
