"""Continuous batching: calls join and leave between any two steps, and a step gives each one token.

What is true: a call is waiting, running, or ended, never two of these; it ends once; a call that is interrupted is
waiting again, ahead of all that came later, with its tokens unless it restarts. Knows nothing of threads.
"""

import math
from collections import deque

import torch

from rollwright.policies.base import EngineError
from rollwright.policies.torch.call import Call
from rollwright.policies.torch.counters import Counters
from rollwright.policies.torch.rows import Rows
from rollwright.policies.torch.sampler import sample


class Batcher:
    """See the module's docstring. Used by one thread."""

    def __init__(self, rows: Rows, counters: Counters) -> None:
        self._rows = rows
        self._counters = counters
        self._waiting: deque[Call] = deque()
        self._running: dict[Call, None] = {}
        """In the order they came in."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, call: Call) -> None:
        self._waiting.append(call)

    def step(self, version: int, *, admit: bool = True) -> list[Call]:
        """One token more for every running call; returns those that ended. Nobody joins unless `admit`."""
        with torch.inference_mode():
            if admit:
                self._running.update(dict.fromkeys(self._rows.admit(self._waiting)))
            ended = []
            for calls, logits in self._rows.forward():
                self._sample(calls, logits, version)
                ended += [call for call in calls if call.ended]
            for call in ended:
                self._leave(call)
        self._counters.steps += 1
        return ended

    def drop_cancelled(self) -> int:
        """Lets go of the calls that nobody waits for; returns how many those were."""
        running = [call for call in self._running if call.cancelled]
        with torch.inference_mode():
            for call in running:
                self._leave(call)
        before = len(self._waiting)
        self._waiting = deque(call for call in self._waiting if not call.cancelled)
        return len(running) + before - len(self._waiting)

    def interrupt(self, *, restart: bool) -> None:
        """Takes all running calls out, to be admitted again; nothing computed so far is used for them."""
        running = list(self._running)
        self._running.clear()
        self._rows.clear()
        self._waiting.extendleft(reversed(running))
        for call in running:
            if restart:
                self._counters.restarted_calls += 1
                self._counters.discarded_tokens += call.restart()
            else:
                self._counters.resumed_calls += 1

    def give_up(self, *, waiting: bool) -> list[Call]:
        """Lets go of all running calls, and of those that wait as well if `waiting`."""
        calls = [*self._running, *(self._waiting if waiting else ())]
        self._running.clear()
        self._rows.clear()
        if waiting:
            self._waiting.clear()
        return calls

    def _leave(self, call: Call) -> None:
        del self._running[call]
        self._rows.release(call)

    def _sample(self, calls: list[Call], logits: torch.Tensor, version: int) -> None:
        tokens, logprobs = sample(
            logits,
            [call.temperature for call in calls],
            [call.top_p for call in calls],
            [call.draw() for call in calls],
        )
        for call, token, logprob in zip(calls, tokens, logprobs, strict=True):
            if math.isfinite(logprob):
                call.take(token, logprob, version)
                self._counters.sampled_tokens += 1
            else:
                call.error = EngineError(
                    f"weights of version {version} gave logits that are not numbers; nothing can be sampled"
                )
