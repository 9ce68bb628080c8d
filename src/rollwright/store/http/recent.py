"""What the server remembers of recent calls, for callers that lost an answer or stopped waiting for one.

Always true: what a withdrawn call gave out goes back to the queue, whether the withdrawal comes before the call,
while it runs, or after its answer was sent; a repeat of a call that was answered gets the same answer. Both hold
for the last `REMEMBERED` calls. A server that restarts forgets them, and then the leases decide.
"""

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollwright.store.contract import Store, StoreError
from rollwright.store.http.messages import Once
from rollwright.store.http.playing_calls import Claiming
from rollwright.store.records import AttemptedRollout, AttemptStatus

REMEMBERED = 10_000
"""More than a second of the fastest traffic, when a caller's first repeats and withdrawals come within a tenth of
one; a few MB."""

Value = TypeVar("Value")


class Recent(OrderedDict[str, Value], Generic[Value]):
    """The values set last."""

    def __setitem__(self, key: str, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > REMEMBERED:
            self.popitem(last=False)


@dataclass(slots=True)
class _Claim:
    withdrawn: bool = False
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """The attempts that were given out."""

    def require_wanted(self, call_id: str) -> None:
        if self.withdrawn:
            raise StoreError(f"the call {call_id} was withdrawn")


class RecentCalls:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._claims: Recent[_Claim] = Recent()
        self._answers: Recent[Any] = Recent()

    async def claim(self, call: Claiming[Any]) -> Any:
        if call.call_id is None:
            return await call.make(self._store)
        claim = self._claim(call.call_id)
        claim.require_wanted(call.call_id)
        answer = await call.make(self._store)
        attempted: list[AttemptedRollout] = answer if isinstance(answer, list) else [answer]
        if attempted:
            claim.pairs = [(each.rollout_id, each.attempt.attempt_id) for each in attempted]
        if claim.withdrawn:
            await self._give_back(claim)
        claim.require_wanted(call.call_id)
        return answer

    async def withdraw(self, call_id: str) -> None:
        claim = self._claim(call_id)
        claim.withdrawn = True
        await self._give_back(claim)

    async def answer_once(self, call: Once[Any]) -> Any:
        if call.call_id is None:
            return await call.make(self._store)
        key = f"{call.name} {call.call_id}"
        answer = self._answers.get(key)
        if answer is None:
            answer = await call.make(self._store)
            if answer:  # one that found nothing to do finds nothing again
                self._answers[key] = answer
        return answer

    def _claim(self, call_id: str) -> _Claim:
        claim = self._claims.get(call_id)
        if claim is None:
            claim = self._claims[call_id] = _Claim()
        return claim

    async def _give_back(self, claim: _Claim) -> None:
        for rollout_id, attempt_id in list(claim.pairs):
            # One that has lost the rollout already is refused, and that is as good.
            with suppress(StoreError):
                await self._store.update_attempt(
                    rollout_id, attempt_id, status=AttemptStatus.CANCELLED, reason="its worker stopped asking"
                )
        claim.pairs = []
