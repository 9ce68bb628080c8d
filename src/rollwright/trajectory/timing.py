"""Plain data: what an attempt waited for, and when.

It stands beside the turns and not in them, because a turn is the same in every attempt that replays it and its timing is
not. Waits may overlap, where an agent makes calls at the same time; who adds them up says whose a shared moment is.
"""

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """What an episode is waiting for. Of several at once the first in this order counts: while the engine works for an
    episode, nothing else holds it up."""

    ENGINE = "engine"
    """A generation, the engine's line included."""
    TRANSPORT = "transport"
    """The way to the engine and back: what a generation took beyond what the engine says it took."""
    TOOL = "tool"
    ENVIRONMENT = "environment"
    LOCK = "lock"
    """Something that others hold: a place in a tool's pool, a limit."""
    STORE = "store"
    """The journal, settings, or the commit of a result."""
    AGENT = "agent"
    """Nothing: the agent's own code runs, or waits until its process gets to it."""


class Wait(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One thing that an attempt waited for."""

    phase: Phase
    start: float
    """Seconds after the attempt's."""
    seconds: float
    agent: str = ""
    """For whom; empty: for the episode as a whole."""
    name: str = ""
    """Which of its kind: the tool's name, `reset` or `step` of an environment."""
    tokens: int = 0
    """Sampled in it."""

    @property
    def stop(self) -> float:
        return self.start + self.seconds


class Timing(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """When an attempt was played, and what it waited for meanwhile."""

    started: float
    """Seconds since 1970, by the clock of its machine."""
    wall: float
    """Seconds from the claim until the result was there; its commit is not in it."""
    worker: str = ""
    process: int = 0
    """The worker's process id; workers in one process have the same, and share an engine that lives in it."""
    waits: tuple[Wait, ...] = ()
    """In the order in which they ended."""
