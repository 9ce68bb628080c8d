"""The server's memory of recent calls, for callers that lost a reply or stopped waiting for one.

Always true: the attempts of a withdrawn claim go back to the queue, whether the withdrawal arrives before the claim,
while it runs, or after its reply was sent; a repeat of a call with the same idempotency key gets the first result.
Both hold for the last `REMEMBERED` calls. A server that restarts forgets them, and then the leases decide.
"""

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollwright.store.api import Store
from rollwright.store.call_kinds import ClaimCall, OnceCall
from rollwright.store.errors import StoreError
from rollwright.store.records import AttemptedRollout, AttemptStatus

REMEMBERED = 10_000
"""More than a second of the fastest traffic, when a caller's first repeats and withdrawals come within a tenth of
one; a few MB."""

Value = TypeVar("Value")


class RecentValues(OrderedDict[str, Value], Generic[Value]):
    """A mapping of the `REMEMBERED` values that were set last."""

    def __setitem__(self, key: str, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > REMEMBERED:
            self.popitem(last=False)


@dataclass(slots=True)
class _Claim:
    withdrawn: bool = False
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """The rollout and attempt ids that were given out."""

    def require_wanted(self, call_id: str) -> None:
        if self.withdrawn:
            raise StoreError(f"the call {call_id} was withdrawn")


class RecentCalls:
    """Executes claims and calls with an idempotency key."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._execute = store.execute
        self._claims: RecentValues[_Claim] = RecentValues()
        self._results: RecentValues[Any] = RecentValues()

    async def claim(self, call: ClaimCall[Any]) -> Any:
        if call.call_id is None:
            return await call.bounded(self._execute)
        claim = self._claim(call.call_id)
        claim.require_wanted(call.call_id)
        result = await call.bounded(self._execute)
        attempted: list[AttemptedRollout] = result if isinstance(result, list) else [result]
        if attempted:
            claim.pairs = [(each.rollout_id, each.attempt.attempt_id) for each in attempted]
        if claim.withdrawn:
            await self._give_back(claim)
        claim.require_wanted(call.call_id)
        return result

    async def withdraw(self, call_id: str) -> None:
        claim = self._claim(call_id)
        claim.withdrawn = True
        await self._give_back(claim)

    async def execute_once(self, call: OnceCall[Any]) -> Any:
        if call.call_id is None:
            return await call.bounded(self._execute)
        key = f"{call.name} {call.call_id}"
        result = self._results.get(key)
        if result is None:
            result = await call.bounded(self._execute)
            if result:  # a call that found nothing to do may be executed again
                self._results[key] = result
        return result

    def _claim(self, call_id: str) -> _Claim:
        claim = self._claims.get(call_id)
        if claim is None:
            claim = self._claims[call_id] = _Claim()
        return claim

    async def _give_back(self, claim: _Claim) -> None:
        for rollout_id, attempt_id in list(claim.pairs):
            # An attempt that lost the rollout already is rejected, which is as good.
            with suppress(StoreError):
                await self._store.update_attempt(
                    rollout_id, attempt_id, status=AttemptStatus.CANCELLED, reason="its worker stopped asking"
                )
        claim.pairs = []
