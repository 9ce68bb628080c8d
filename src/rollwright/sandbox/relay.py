"""Relays between the loopback of a box and services outside it.

A listening socket that was opened in a box's network namespace can be served from outside: a connection to it reaches this
process, and nothing else of the machine. `Relay` joins such connections with one fixed address, the attempt's gateway, and lets
only requests below the path of the attempt's own rollout pass: a box that has got hold of another rollout's key cannot use it.
`ProxyRelay` is an HTTP proxy that joins them with hosts that a rule allows; addresses of this machine and of private networks
are always refused, so that a name in a foreign DNS cannot lead there.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import httptools

GATEWAY_PORT, PROXY_PORT = 9119, 9118
"""Ports on a box's loopback. They are the same in every box, so that prompts which name them are the same, too."""

_BLOCK = 64 * 1024
_MAX_HEAD = 64 * 1024
_CONNECT_SECONDS = 20.0
_LONGEST_HEAD = 1 << 17
"""Bytes that are held until a request's head has ended; the head itself is at most half of that."""
_REFUSED = b"HTTP/1.1 %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"


class Relay:
    """Joins every connection with one address."""

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        self._host = split.hostname or "127.0.0.1"
        self._port = split.port or (443 if split.scheme == "https" else 80)
        self._tls = split.scheme == "https"
        path = split.path.rstrip("/").removesuffix("/v1")
        self._prefix = f"{path}/".encode() if path else b""
        """Path below which every request must be; empty: any."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, listening: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listening)

    def join_socket(self, connected: socket.socket) -> None:
        """Joins a connection that was accepted elsewhere."""
        task = asyncio.get_running_loop().create_task(self._join_socket(connected))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for each in self._connections:
            each.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _join_socket(self, connected: socket.socket) -> None:
        await self._accept(*await asyncio.open_connection(sock=connected))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._join(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            pass  # by `close` alone; `asyncio.start_server` would log a traceback for it
        finally:
            self._connections.discard(task)
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_CONNECT_SECONDS):
            other = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None)
        if not self._prefix:
            return await _pump_both((reader, writer), other)
        try:
            await asyncio.gather(
                _pump_requests(reader, other[1], writer, self._prefix), _pump(other[0], writer)
            )
        finally:
            other[1].close()


class _RequestPaths:
    """Notices requests whose path is not below a prefix; the callbacks are those of httptools."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._path = b""
        self.in_head = False
        """Whether the head of a request has begun and not ended."""
        self.has_refused = False

    def on_message_begin(self) -> None:
        self._path = b""
        self.in_head = True

    def on_url(self, part: bytes) -> None:
        self._path += part

    def on_headers_complete(self) -> None:
        self.in_head = False
        segments = self._path.partition(b"?")[0].split(b"/")
        self.has_refused |= not self._path.startswith(self._prefix) or b".." in segments


async def _pump_requests(
    reader: asyncio.StreamReader, to: asyncio.StreamWriter, back: asyncio.StreamWriter, prefix: bytes
) -> None:
    """Copies requests as long as all of them are below the prefix; the first other one ends the connection. Nothing is copied
    that ends within a head: a server might act on the first line alone."""
    paths = _RequestPaths(prefix)
    parser = httptools.HttpRequestParser(paths)
    held = b""
    with suppress(ConnectionError):
        while block := await reader.read(_BLOCK):
            held += block
            try:
                parser.feed_data(block)
            except httptools.HttpParserError:
                paths.has_refused = True
            if paths.has_refused or (paths.in_head and len(held) > _LONGEST_HEAD):
                text = b"this box reaches the gateway of its own rollout alone"
                with suppress(RuntimeError):  # the gateway may have ended the answers already
                    back.write(_REFUSED % (b"403 Forbidden", len(text), text))
                    await back.drain()
                to.close()
                return
            if not paths.in_head:
                to.write(held)
                held = b""
                await to.drain()
        to.write_eof()


async def close_relays(relays: list[Relay]) -> None:
    """Closes relays and empties the list."""
    for each in relays:
        await each.close()
    relays.clear()


class ProxyRelay(Relay):
    """An HTTP proxy for allowed hosts."""

    def __init__(self, allowed: Sequence[str] | None) -> None:
        """`allowed`: names of hosts, `*.` before a domain for all below it; `None`: every public host."""
        super().__init__("")
        self._allowed = allowed

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if len(head) > _MAX_HEAD:
            return
        method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        is_tunnel = method.upper() == "CONNECT"
        split = urlsplit(f"//{target}" if is_tunnel else target)
        host, port = split.hostname or "", split.port or (443 if is_tunnel else 80)
        address = await self._find(host, port)
        if address is None:
            text = f"{host}: this box may not reach it".encode()
            writer.write(_REFUSED % (b"403 Forbidden", len(text), text))
            await writer.drain()
            return
        async with asyncio.timeout(_CONNECT_SECONDS):
            other = await asyncio.open_connection(address, port)
        if is_tunnel:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            path = split.path or "/"
            lines = head.split(b"\r\n")
            lines[0] = f"{method} {path}{'?' + split.query if split.query else ''} HTTP/1.1".encode("latin-1")
            # One request for each connection: the next one could be for another host.
            kept = [each for each in lines[1:-2] if not each.lower().startswith((b"proxy-", b"connection:"))]
            other[1].write(b"\r\n".join([lines[0], *kept, b"Connection: close", b"", b""]))
        await _pump_both((reader, writer), other)

    async def _find(self, host: str, port: int) -> str | None:
        """The address of an allowed host; `None`: it is not allowed, or not public."""
        if not host or not is_allowed(host, self._allowed):
            return None
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            return None
        addresses = [str(each[4][0]) for each in found]
        return next((each for each in addresses if is_public(each)), None)


def is_allowed(host: str, allowed: Sequence[str] | None) -> bool:
    """Whether a rule names the host, in whatever case."""
    name = host.lower().rstrip(".")
    return allowed is None or any(
        name == each.lower() or (each.startswith("*.") and name.endswith(each[1:].lower()))
        for each in allowed
    )


def is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_global
    except ValueError:
        return False


def proxy_variables(url: str) -> dict[str, str]:
    """Variables by which programs find a proxy; both cases are in use."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {**dict.fromkeys(names, url), "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _pump_both(one: Stream, other: Stream) -> None:
    """Copies both ways until both sides have ended."""
    try:
        await asyncio.gather(_pump(one[0], other[1]), _pump(other[0], one[1]))
    finally:
        other[1].close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()
        writer.write_eof()
