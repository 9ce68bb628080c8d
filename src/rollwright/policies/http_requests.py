"""HTTP/1.1 requests out of a stream of bytes, for the simulated server.

What is true: however the bytes are cut into reads, the same requests come out, in order. A body has a
`Content-Length` or there is none; whatever else the protocol allows (chunks, continuations, upgrades) and
whatever it forbids is refused with a 4xx, after which the connection is of no use any more.
"""

import re
from typing import NamedTuple

MAX_HEAD = 16 * 1024
"""Bytes of a request line with its headers: what usual servers accept."""

MAX_BODY = 16 * 1024 * 1024
"""A conversation of a million tokens takes about 4 MiB."""

_REQUEST_LINE = re.compile(rb"([A-Z]+) (/[^ ?]*)(?:\?[^ ]*)? HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_END_OF_HEAD = b"\r\n\r\n"


class Request(NamedTuple):
    method: str
    path: str
    body: bytes
    keep_alive: bool


class RequestRefused(Exception):
    """Not a request that this server takes."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class RequestReader:
    """One connection's bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Request | None = None
        """A request whose body has not come yet, or not all of it."""
        self._length = 0
        """Of that body."""

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Request | None:
        """The next whole request; `None`: more bytes are needed."""
        if self._head is None:
            self._head = self._read_head()
        if self._head is None or len(self._buffer) < self._length:
            return None
        request = self._head._replace(body=bytes(self._buffer[: self._length]))
        del self._buffer[: self._length]
        self._head = None
        return request

    def _read_head(self) -> Request | None:
        end = self._buffer.find(_END_OF_HEAD, 0, MAX_HEAD)
        if end < 0:
            if len(self._buffer) >= MAX_HEAD:
                raise RequestRefused(431, f"the headers are longer than {MAX_HEAD} bytes")
            return None
        first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + len(_END_OF_HEAD)]
        line = _REQUEST_LINE.fullmatch(first)
        if line is None:
            raise RequestRefused(400, "the first line is not an HTTP/1.1 request")
        headers = _headers(lines)
        self._length = _body_length(headers)
        connection = headers.get(b"connection", b"").lower()
        keep_alive = connection != b"close" if line[3] == b"1" else connection == b"keep-alive"
        return Request(line[1].decode(), line[2].decode("latin-1"), b"", keep_alive)


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    """By lower-case name; a name that comes twice has its values joined, as HTTP says."""
    headers: dict[bytes, bytes] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise RequestRefused(400, "a header line is malformed")
        name, value = match[1].lower(), match[2]
        headers[name] = headers[name] + b", " + value if name in headers else value
    return headers


def _body_length(headers: dict[bytes, bytes]) -> int:
    if b"transfer-encoding" in headers:
        raise RequestRefused(411, "a body needs a Content-Length; transfer encodings are not supported")
    if b"expect" in headers:
        raise RequestRefused(417, "expectations are not supported; send the body at once")
    value = headers.get(b"content-length", b"0")
    if not (value.isdigit() and len(value) < 20):
        raise RequestRefused(400, "Content-Length is not one number")
    if (length := int(value)) > MAX_BODY:
        raise RequestRefused(413, f"the body is longer than {MAX_BODY} bytes")
    return length
