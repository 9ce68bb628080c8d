"""Calls that were made already, so that a request that is sent again is not sampled again.

Always true: a request repeats an earlier one if both have the same name (made of the body, and of the idempotency key
where the client gives one) and the earlier one's answer reached nobody, or the client says that it repeats. Equal
requests that are none of these are different calls: an agent may ask the same thing several times on purpose. A call
that failed is forgotten, so its repetition is a new try.
"""

import asyncio

from rollwright.gateway.types import ModelReply


class ModelCall:
    """One call, and how many clients wait for it."""

    __slots__ = ("clients", "delivered", "task")

    def __init__(self, task: "asyncio.Task[ModelReply]") -> None:
        self.task = task
        """Goes on when its client leaves: what is sampled is recorded."""
        self.clients = 1
        """Requests that wait for the answer, or are being told it."""
        self.delivered = False
        """Whether a client was there until the answer had been sent whole."""

    @property
    def abandoned(self) -> bool:
        return self.clients == 0 and not self.delivered


class CallLog:
    """All calls of one rollout."""

    def __init__(self) -> None:
        self._calls: dict[bytes, list[ModelCall]] = {}
        self._by_turn: dict[int, ModelCall] = {}

    def find_repeated(self, name: bytes, marked: bool) -> ModelCall | None:
        """The earlier call that this request repeats; its caller waits for it from now on."""
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
        """The call has made a turn."""
        for call in self._calls[name]:
            if call.task is task:
                self._by_turn[task.result().turn_id] = call

    def forget(self, name: bytes, task: "asyncio.Task[ModelReply]") -> None:
        self._calls[name] = [call for call in self._calls[name] if call.task is not task]

    @property
    def under_way(self) -> "list[asyncio.Task[ModelReply]]":
        return [call.task for call in self._all() if not call.task.done()]

    def undelivered(self) -> list[ModelReply]:
        """Answers that were recorded and reached nobody."""
        ended = [call.task for call in self._all() if call.task.done() and not call.delivered]
        return [task.result() for task in ended if not task.cancelled() and task.exception() is None]

    def note_heard(self, turn_id: int) -> None:
        """A conversation goes on from this turn, so its answer has reached the client whatever was seen of it."""
        if (call := self._by_turn.get(turn_id)) is not None:
            call.delivered = True

    def _all(self) -> list[ModelCall]:
        return [call for calls in self._calls.values() for call in calls]
