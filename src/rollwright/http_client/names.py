"""Addresses of hosts.

What is true: however many connections are opened at once, a name is looked up once, and again after a while; a look-up
that fails is not remembered; who gives up waiting for one leaves it to the others.
"""

import asyncio
import socket

_KEPT_SECONDS = 10.0
"""Long enough for thousands of connections that are opened at once; a name that moves is followed soon."""


class Names:
    def __init__(self) -> None:
        self._looking: dict[str, asyncio.Task[list[str]]] = {}
        """Also those that have found something, for as long as it is kept."""

    async def addresses(self, host: str, port: int) -> list[str]:
        """At least one, in the order in which the system would try them."""
        if _is_address(host):
            return [host]
        task = self._looking.get(host)
        if task is None:
            task = self._looking[host] = asyncio.create_task(self._look_up(host, port))
        return await asyncio.shield(task)

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        kept = 0.0
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            kept = _KEPT_SECONDS
            return list(dict.fromkeys(str(address[0]) for *_, address in found))
        finally:
            loop.call_later(kept, self._looking.pop, host, None)


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False
