"""HTTP/1.1 messages of the simulated server, as pure code: requests parsed from bytes, completions and errors as replies.

Always true: the same bytes give the same requests, in order, however they are split into reads. A request with a body has a
`Content-Length`; everything else that the protocol allows (chunks, continuations, upgrades) or forbids is refused with a
4xx, after which the connection cannot be used further.
"""

import re
from typing import Annotated, Any, NamedTuple

import msgspec

from rollwright.simulation.vllm import SimulatedWeights, token_choice

MAX_HEAD = 16 * 1024
"""Bytes of a request line with its headers; common servers accept as much."""

MAX_BODY = 16 * 1024 * 1024
"""A conversation of a million tokens takes about 4 MiB."""

_REQUEST_LINE = re.compile(rb"([A-Z]+) (/[^ ?]*)(?:\?[^ ]*)? HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_END_OF_HEAD = b"\r\n\r\n"


class Request(NamedTuple):
    """A parsed request."""

    method: str
    path: str
    body: bytes
    keep_alive: bool


class RequestRefused(Exception):
    """The bytes are not a request that this server accepts."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class RequestReader:
    """Parses the requests of one connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Request | None = None
        """A request whose body is incomplete."""
        self._length = 0
        """Bytes of that body."""

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
    """Headers by lower-case name; values of a repeated header are joined, as HTTP defines."""
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


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

_REASONS = {200: "OK", 429: "Too Many Requests", 500: "Internal Server Error"}


class _Message(msgspec.Struct):
    role: str
    content: str


class _Body(msgspec.Struct):
    model: str = "simulated"
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool = False


class _ChatBody(_Body, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]


class _TextBody(_Body, kw_only=True):
    prompt: str | list[int]
    temperature: float = 1.0


_decode_chat = msgspec.json.Decoder(_ChatBody).decode
_decode_text = msgspec.json.Decoder(_TextBody).decode
encode = msgspec.json.Encoder().encode


class HttpReply(NamedTuple):
    """A reply of the server."""

    status: int
    body: bytes
    headers: bytes = b""

    def to_bytes(self, keep_alive: bool) -> bytes:
        return b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b%b\r\n%b" % (
            self.status,
            _REASONS.get(self.status, "Refused").encode(),
            len(self.body),
            self.headers,
            b"" if keep_alive else b"Connection: close\r\n",
            self.body,
        )


def completion(
    request: Request, number: int, text: str, share: float, weights: SimulatedWeights, raw_logprobs: bool
) -> HttpReply:
    """The completion for a valid request, or an error for an invalid one. `share`: of the tokens sampled before an abort."""
    chat = request.path == CHAT
    try:
        body = _decode_chat(request.body) if chat else _decode_text(request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as mistake:
        return error(400, f"the body is not a completion request: {mistake}")
    if body.stream:
        return error(400, "streaming is not supported")
    if isinstance(body, _ChatBody):
        prompt_tokens = sum(len(message.content.encode()) for message in body.messages)
        choice, tokens = _text_choice(text, body.max_tokens)
        choice = {**choice, "message": {"role": "assistant", "content": choice.pop("text")}}
    elif isinstance(body.prompt, str):
        prompt_tokens = len(body.prompt.encode())
        choice, tokens = _text_choice(text, body.max_tokens)
    else:
        prompt_tokens = len(body.prompt)
        temperature = 1.0 if raw_logprobs else body.temperature
        choice = token_choice(body.prompt, text, body.max_tokens, share, weights.loads, temperature)
        tokens = len(choice["token_ids"])
    answer = {
        "id": f"simulated-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": body.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        },
    }
    return HttpReply(200, encode(answer))


def _text_choice(text: str, max_tokens: int | None) -> tuple[dict[str, Any], int]:
    """A text completion and its number of tokens."""
    tokens = text.encode()
    finish = "stop"
    if max_tokens is not None and max_tokens < len(tokens):
        tokens = tokens[:max_tokens]
        text = tokens.decode(errors="replace")
        finish = "length"
    return {"index": 0, "finish_reason": finish, "text": text}, len(tokens)


def error(status: int, message: str, headers: str = "") -> HttpReply:
    return HttpReply(status, encode({"error": {"message": message, "code": status}}), headers.encode())
