"""The web server of the store and the gateway: uvicorn with limits for every connection.

Always true: every connection stays within `ServerLimits`, whatever its client does.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn

from rollwright.errors import ConfigError
from rollwright.http.server_connection import GuardedConnection
from rollwright.http.server_limits import Connections, ServerLimits

_DRAIN_SECONDS = 10
"""Time that requests under way may take when the server stops."""

BACKLOG = 2048
"""Connections that may wait to be accepted: all agents of a worker, or all workers of a cluster, may connect at once."""


class Listener(uvicorn.Server):
    """A uvicorn server that stops by `stop`; it leaves signals to its program."""

    def __init__(self, app: Any, limits: ServerLimits | None = None) -> None:
        """`app`: an ASGI application."""
        limits = limits or ServerLimits()
        self.connections = Connections(limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(GuardedConnection, self.connections),  # type: ignore[arg-type] # a factory
                lifespan="off",
                ws="none",
                proxy_headers=False,
                log_level="error",  # malformed requests of strangers would fill the log
                access_log=False,
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=limits.idle_seconds,
                timeout_graceful_shutdown=_DRAIN_SECONDS,
            )
        )
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            self.connections.sweep(loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(self.connections.limits.sweep_seconds):
                    await self._stopping.wait()


def guarded_socket(host: str, port: int, token: str | None) -> socket.socket:
    """As `listening_socket`; a server without a token may only listen where its own machine alone reaches it."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"host: {host!r} can be reached from other machines; give a token, or listen on 127.0.0.1"
        )
    return listening_socket(host, port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def server_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listening_socket(host: str, port: int) -> socket.socket:
    """A non-blocking socket that listens on the first address of `host`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    bound.setblocking(False)
    return bound
