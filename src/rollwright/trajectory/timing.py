"""Plain data: the recorded waits of an attempt.

They are stored beside the turns and not in them, because every attempt that replays a turn has the same turn but its own
timing. Waits overlap where an agent makes concurrent calls; `rollwright.observe.attribution` assigns each instant to one
phase.
"""

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """What an episode waits for. Of concurrent phases the first in this order counts: while the engine generates for an
    episode, no other phase delays it."""

    ENGINE = "engine"
    """A generation, including the time in the engine's queue."""
    TRANSPORT = "transport"
    """The network path to the engine: the time of a generation beyond the time that the engine reports."""
    TOOL = "tool"
    ENVIRONMENT = "environment"
    LOCK = "lock"
    """A shared resource: a slot in a tool's pool or a concurrency limit."""
    STORE = "store"
    """A store call: the journal, settings, or the commit of a result."""
    AGENT = "agent"
    """No recorded wait: the agent's own code runs, or is ready to run."""


class Wait(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One wait of an attempt."""

    phase: Phase
    start: float
    """Seconds since the start of the attempt."""
    seconds: float
    agent: str = ""
    """The agent that waited; empty: the episode as a whole."""
    name: str = ""
    """Name of the tool, or `reset` or `step` of an environment."""
    tokens: int = 0
    """Tokens that were sampled during the wait."""

    @property
    def stop(self) -> float:
        return self.start + self.seconds


class Timing(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Start, duration and waits of an attempt."""

    started: float
    """Unix time on the clock of its machine."""
    wall: float
    """Seconds from the claim to the result, without its commit."""
    worker: str = ""
    process: int = 0
    """Process id of the worker; workers in one process share it, and share an in-process engine."""
    waits: tuple[Wait, ...] = ()
    """In order of their ends."""
