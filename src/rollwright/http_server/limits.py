"""How much time, memory and how many file handles connections may take, and how that follows from the machine."""

import resource
from dataclasses import dataclass

MAX_CONNECTIONS = 10_000
"""Where the file handles would allow more: each connection takes about 10 KB, and a sweep looks at all of them."""

FEWEST_CONNECTIONS = 8
"""Where hardly any file handles are left, a server still serves one after the other."""

_WANTED_HANDLES = 65_536
"""More than the connections of any cluster; far from the millions that some systems allow and some programs walk."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of one server. The defaults let every honest client through and leave strangers little to hold."""

    connections: int | None = None
    """Most at a time. Above it, those that hold a place without using it are closed first, the oldest first; if all
    are in use, a new one is refused. `None`: half of the file handles that the process may have, because stores,
    engines and sandboxes of the same process need the others."""
    head_seconds: float = 10.0
    """From the first byte of a request, or from the connection's start, to the end of its headers: clients send them
    in one piece."""
    head_bytes: int = 64 * 1024
    """Request line and headers together; keys, ids and what SDKs add take about 2 KiB."""
    headers: int = 128
    """In one request; SDKs send about 20."""
    pipelined: int = 16
    """Requests sent ahead of their answers; usual clients never do."""
    body_seconds: float = 10.0
    """For a body, on top of what it takes at `bytes_per_second`."""
    answer_seconds: float = 20.0
    """For a client to take an answer, on top of what it takes at `bytes_per_second`."""
    bytes_per_second: int = 16 * 1024
    """A client slower than this in the mean holds a place on purpose, or its line is broken."""
    unread_bytes: int = 256 * 1024 * 1024
    """Answers that their clients have not taken yet, all together; above it the slowest are closed."""
    idle_seconds: int = 75
    """Between two requests of a connection. Longer than clients keep an idle one, so that they never send into one that
    is being closed."""
    sweep_seconds: float = 1.0
    """Between two looks at all connections: the limits above are that exact."""
    linger_seconds: float = 2.0
    """A connection whose request was refused before it was read whole is still read for so long, and thrown away: if it
    were closed at once, the system would tell the client of a broken connection instead of the reason."""
    linger_bytes: int = 4 * 1024 * 1024
    """At most so much of it."""

    @property
    def most_connections(self) -> int:
        if self.connections is not None:
            return self.connections
        handles, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if handles == resource.RLIM_INFINITY:
            return MAX_CONNECTIONS
        return max(FEWEST_CONNECTIONS, min(MAX_CONNECTIONS, handles // 2))


def raise_handle_limit() -> None:
    """Lets this process have the file handles that it may have without asking anybody: the usual 1,024 are a default
    for programs that cannot count further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_HANDLES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
