"""Limits of a server, and the table of its connections.

Always true: a connection that waits for its client gives up its place when a new connection needs it. One sweep a second
checks every connection, so a request costs a few assignments and no timer.
"""

import logging
import resource
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollwright.http.server_connection import GuardedConnection

MAX_CONNECTIONS = 10_000
"""Upper bound where file handles allow more: a connection takes about 10 KB, and a sweep checks all of them."""


FEWEST_CONNECTIONS = 8
"""Lower bound where hardly any file handles are left."""


_WANTED_HANDLES = 65_536
"""More than the connections of any cluster; far fewer than the millions that some systems allow, which programs that
iterate over all handles suffer from."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of one server. The defaults admit every honest client and give attackers little to hold."""

    connections: int | None = None
    """Most at a time. Above it, connections that hold a place without using it are closed, the oldest first; if all are in
    use, a new one is refused. `None`: half of the process's file handles, because stores, engines and sandboxes of the
    same process need the others."""
    head_seconds: float = 10.0
    """From the start of the connection or the first byte of a request to the end of its headers: clients send them in one
    piece."""
    head_bytes: int = 64 * 1024
    """Request line and headers together; with keys, ids and headers of SDKs they take about 2 KiB."""
    headers: int = 128
    """In one request; SDKs send about 20."""
    pipelined: int = 16
    """Requests sent before the response to the previous one; common clients never do this."""
    body_seconds: float = 10.0
    """For a body, in addition to its time at `bytes_per_second`."""
    answer_seconds: float = 20.0
    """For a client to read a response, in addition to its time at `bytes_per_second`."""
    bytes_per_second: int = 16 * 1024
    """A client that is slower on average holds a place on purpose, or its network is broken."""
    unread_bytes: int = 256 * 1024 * 1024
    """Total of responses that their clients have not read; above it the slowest connections are closed."""
    idle_seconds: int = 75
    """Between two requests of a connection. Longer than clients keep an idle connection, so that they never send a request
    into one that is being closed."""
    sweep_seconds: float = 1.0
    """Between two sweeps: the precision of the limits above."""
    linger_seconds: float = 2.0
    """A connection whose request was refused before it was read whole is drained for so long: if it were closed at once, the
    client would get a connection reset instead of the response."""
    linger_bytes: int = 4 * 1024 * 1024
    """Most bytes drained."""

    @property
    def most_connections(self) -> int:
        if self.connections is not None:
            return self.connections
        handles, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if handles == resource.RLIM_INFINITY:
            return MAX_CONNECTIONS
        return max(FEWEST_CONNECTIONS, min(MAX_CONNECTIONS, handles // 2))


def raise_handle_limit() -> None:
    """Raise the soft limit of file handles as far as the hard limit allows: the usual 1,024 are a default for programs that
    use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_HANDLES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_LOG_SECONDS = 10.0
"""Between two log lines about closed connections: an attack must not fill the disk."""


_log = logging.getLogger(__name__)


class Stage(Enum):
    """What a connection waits for; the value is the reason in the log when it is closed there."""

    HEAD = "sent no request"
    """The headers of a request."""
    BODY = "sent its request too slowly"
    """The body of a request whose headers are complete."""
    WORK = "did not take its answer"
    """The response to a complete request."""
    IDLE = "idle"
    """The next request."""
    LINGER = "refused"
    """The client, to read a refusal."""


_EXPENDABLE = (Stage.LINGER, Stage.HEAD, Stage.IDLE)
"""Stages that give up their place for a new connection, in this order: refused ones, then ones that have sent nothing, then
idle clients, which can connect again."""


_FULL = "no place left"


_UNREAD = "too many unread answers"


class Connections:
    """All connections of one server."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.most = limits.most_connections
        self.closed: Counter[str] = Counter()
        """Counts connections that the server ended, by reason."""
        self._stages: dict[Stage, OrderedDict[GuardedConnection, None]] = {
            stage: OrderedDict() for stage in Stage
        }
        """Connections by stage, in the order in which they entered it."""
        self._count = 0
        self._swept: float | None = None
        self._logged: tuple[float, int] = (0.0, 0)
        """Time of the last log line, and the count in it."""

    def __len__(self) -> int:
        return self._count

    def admit(self, new: "GuardedConnection") -> bool:
        """Admit a new connection; if the server is full, close an expendable one for it. False: there is none."""
        if self._count >= self.most and not self._make_room():
            self.closed[_FULL] += 1
            return False
        self._count += 1
        self._stages[new.placed][new] = None
        return True

    def _make_room(self) -> bool:
        for stage in _EXPENDABLE:
            if self._stages[stage]:
                self.end(next(iter(self._stages[stage])), _FULL)
                return True
        return False

    def move(self, connection: "GuardedConnection", stage: Stage) -> None:
        """Move a connection to a stage; does nothing for one that was ended, whose request may still run."""
        if connection in self._stages[connection.placed]:
            del self._stages[connection.placed][connection]
            self._stages[stage][connection] = None
            connection.placed = stage

    def remove(self, connection: "GuardedConnection") -> None:
        """Remove a connection; does nothing for one that was not admitted."""
        if connection in self._stages[connection.placed]:
            del self._stages[connection.placed][connection]
            self._count -= 1

    def end(self, connection: "GuardedConnection", why: str) -> None:
        self.closed[why] += 1
        self.remove(connection)
        connection.abort()

    def sweep(self, now: float) -> None:
        """Close connections that are overdue. Time during which this process did not sweep is not held against them."""
        late = 0.0 if self._swept is None else max(0.0, now - self._swept - 2 * self.limits.sweep_seconds)
        self._swept = now
        unread: list[tuple[float, GuardedConnection]] = []
        for connection in [each for stage in self._stages.values() for each in stage]:
            if late:
                connection.extend_time(late)
            why = connection.overdue(now, self.limits)
            if why is not None:
                self.end(connection, why)
            elif connection.stuck_since is not None:
                unread.append((connection.stuck_since, connection))
        self._drop_unread(unread)
        self._log_closed(now)

    def _drop_unread(self, unread: "list[tuple[float, GuardedConnection]]") -> None:
        total = sum(connection.unread for _, connection in unread)
        for _, connection in sorted(unread, key=lambda each: each[0]):
            if total <= self.limits.unread_bytes:
                return
            total -= connection.unread
            self.end(connection, _UNREAD)

    def _log_closed(self, now: float) -> None:
        logged_at, logged = self._logged
        total = self.closed.total() - self.closed[Stage.LINGER.value]  # refused clients got a response
        if total > logged and now - logged_at >= _LOG_SECONDS:
            self._logged = (now, total)
            reasons = ", ".join(f"{count} {why}" for why, count in self.closed.most_common())
            _log.warning("closed connections so far: %s; %d are open", reasons, self._count)
