"""Waiting dequeues of a SQL store: served in the order of their arrival, many with one transaction.

A rollout that was claimed for a caller who stopped waiting meanwhile is requeued.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollwright.errors import RollwrightError
from rollwright.store.records import AttemptedRollout
from rollwright.store.sql.claims import Ask
from rollwright.store.waiting import resolve, wait_until


@dataclass(eq=False, slots=True)
class _Claimant:
    ask: Ask
    future: "asyncio.Future[None]"
    claimed: list[AttemptedRollout] = field(default_factory=list)


class Claimants:
    """The callers that wait for a rollout."""

    def __init__(
        self,
        claim: Callable[[Sequence[Ask]], Awaitable[list[list[AttemptedRollout]]]],
        abandon: Callable[[Sequence[AttemptedRollout]], None],
    ) -> None:
        """`claim` serves as many of the callers as it can, from the first; `abandon` requeues unwanted rollouts."""
        self._claim = claim
        self._abandon = abandon
        self._waiting: list[_Claimant] = []
        self._serving: asyncio.Task[None] | None = None
        self._again = False
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def wait(self, ask: Ask, timeout: float) -> list[AttemptedRollout]:
        if self._closed:  # the store was closed during the caller's own claim
            return []
        for earlier in self._waiting:
            if ask[2] is not None and earlier.ask[2] == ask[2]:
                resolve(earlier.future)  # the same caller, repeating its call after it lost the connection
        claimant = _Claimant(ask, asyncio.get_running_loop().create_future())
        self._waiting.append(claimant)
        if self._again:  # a rollout was enqueued since the caller's own claim found none
            self.wake()
        try:
            await wait_until(claimant.future, timeout)
        except asyncio.CancelledError:
            self._abandon(claimant.claimed)
            raise
        finally:
            if claimant in self._waiting:
                self._waiting.remove(claimant)
        return claimant.claimed

    def wake(self) -> None:
        """Serves the waiting callers, because a rollout may have been enqueued."""
        self._again = True
        if self._waiting and self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve())

    def close(self) -> None:
        """Ends all waits without a rollout; the store is not called any more."""
        self._closed = True
        for claimant in self._waiting:
            resolve(claimant.future)

    async def _serve(self) -> None:
        try:
            while self._again and self._waiting and not self._closed:
                self._again = False
                asked = [each for each in self._waiting if not each.future.done()]
                try:
                    served = await self._claim([each.ask for each in asked])
                except RollwrightError as error:
                    for claimant in asked:
                        if not claimant.future.done():
                            claimant.future.set_exception(error)
                    return
                for claimant, claimed in zip(asked, served, strict=False):
                    if claimant.future.done():
                        self._abandon(claimed)
                    else:
                        claimant.claimed = claimed
                        self._waiting.remove(claimant)
                        resolve(claimant.future)
        finally:
            self._serving = None
