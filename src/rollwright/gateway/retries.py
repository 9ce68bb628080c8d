"""Log of calls, so that a repeated request is not sampled again.

Always true: a request repeats an earlier one if both have the same digest (of the body and the idempotency key, if there is
one) and the earlier answer reached no client, or the client marks the request as a retry. Other equal requests are separate
calls: an agent may send the same prompt several times on purpose. A failed call is removed, so a retry samples again.
"""

import asyncio

from rollwright.gateway.types import ModelReply


class ModelCall:
    """One call, and the number of clients that wait for it."""

    __slots__ = ("clients", "delivered", "task")

    def __init__(self, task: "asyncio.Task[ModelReply]") -> None:
        self.task = task
        """Continues if its client disconnects: sampled tokens are recorded."""
        self.clients = 1
        """Requests that wait for the answer or are receiving it."""
        self.delivered = False
        """Whether the answer was sent completely to a connected client."""

    @property
    def abandoned(self) -> bool:
        return self.clients == 0 and not self.delivered


class CallLog:
    """All calls of one rollout."""

    def __init__(self) -> None:
        self._calls: dict[bytes, list[ModelCall]] = {}
        self._by_turn: dict[int, ModelCall] = {}

    def find_repeated(self, name: bytes, marked: bool) -> ModelCall | None:
        """The earlier call that this request repeats, with the request added to its clients; `None`: it repeats none."""
        known = self._calls.get(name, ())
        found = next((call for call in known if call.abandoned), None)
        if found is None and marked and known:
            found = known[-1]
        if found is not None:
            found.clients += 1
        return found

    def add(self, name: bytes, task: "asyncio.Task[ModelReply]") -> ModelCall:
        call = ModelCall(task)
        self._calls.setdefault(name, []).append(call)
        return call

    def note_answer(self, name: bytes, task: "asyncio.Task[ModelReply]") -> None:
        """Records the turn of a call."""
        for call in self._calls[name]:
            if call.task is task:
                self._by_turn.update((each.turn_id, call) for each in task.result().all)

    def forget(self, name: bytes, task: "asyncio.Task[ModelReply]") -> None:
        self._calls[name] = [call for call in self._calls[name] if call.task is not task]

    @property
    def under_way(self) -> "list[asyncio.Task[ModelReply]]":
        return [call.task for call in self._all() if not call.task.done()]

    def undelivered(self) -> list[ModelReply]:
        """Recorded answers that reached no client."""
        ended = [call.task for call in self._all() if call.task.done() and not call.delivered]
        told = [task.result() for task in ended if not task.cancelled() and task.exception() is None]
        return [each for reply in told for each in reply.all]

    def note_heard(self, turn_id: int) -> None:
        """Marks an answer as delivered, because a later conversation contains it."""
        if (call := self._by_turn.get(turn_id)) is not None:
            call.delivered = True

    def _all(self) -> list[ModelCall]:
        return [call for calls in self._calls.values() for call in calls]
