"""Plain data: what a sandbox is asked and what it answers. What it answers may be made by hostile code."""

import msgspec

from rollwright.sandbox.limits import SandboxLimits


class Start(msgspec.Struct, frozen=True):
    """To the nursery, together with one end of a socket: a new sandbox, which talks there."""

    limits: SandboxLimits
    folders: tuple[str, ...] = ()
    """Folders that its code may read and import from, beside the standard library."""
    is_confined: bool = True
    """Whether it needs namespaces, a filter and an unprivileged user; otherwise limits have to do."""


class Run(msgspec.Struct, frozen=True):
    code: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The first word of a sandbox."""

    missing: str = ""
    """What the machine cannot give, for which reason the sandbox has ended; empty: it is locked in."""


class Ran(msgspec.Struct, frozen=True, tag="ran"):
    """One execution."""

    output: str
    """What it printed, and the value of the last expression."""
    error: str = ""
    """The traceback, as far as it is the code's own; empty: it ran to its end."""
    is_late: bool = False
    """Whether it was interrupted because its time was up."""
    has_ended: bool = False
    """Whether the sandbox ended with it, and all its state."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The last word: how the process ended."""

    signal: int
    """0: it ended itself."""


Reply = Ready | Ran | Ended
