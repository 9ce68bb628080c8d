"""What a request to the gateway says beside its API format: its head, its digest, its size. Pure.

Always true: a request above a limit is refused before it reaches the rollout; the limits do not depend on the API format.
"""

from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from rollwright.engines.base import LONGEST_TOKEN, encoded_tools
from rollwright.gateway.recorder import RolloutRecorder
from rollwright.gateway.types import ApiFormat, ModelRequest
from rollwright.store.http.errors import HttpRefusal

_LONGEST_KEY = 64
"""Significant bytes of an idempotency key; clients send UUIDs."""

MAX_MESSAGES, MAX_TOOLS = 10_000, 1_000
"""Limits of one request. A message costs about 10 µs before the engine sees it; hosted APIs accept 128 tools."""

MAX_STOPS, LONGEST_STOP, LONGEST_MODEL = 100, 1_000, 1_000
"""Stop texts, the characters of one, and those of the model's name. The hosted APIs take four stop texts, and an answer
is searched for each; the name is told back with each event of a stream."""


class RequestHead(NamedTuple):
    """The headers that matter."""

    key: bytes | None
    length: int
    marked: bool
    """Whether the client marks the request as a retry."""
    idempotency_key: bytes | None
    agent: str


def read_head(headers: list[tuple[bytes, bytes]], query: bytes) -> RequestHead:
    """Reads the headers that matter, and the key in an address."""
    key, length, marked, idempotency_key, agent = _query_key(query), 0, False, None, "agent"
    for name, value in headers:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            key = given.strip() if scheme.lower() == b"bearer" else key
        elif name in (b"x-api-key", b"x-goog-api-key"):
            key = value.strip()
        elif name == b"content-length":
            length = int(value)
        elif name == b"x-stainless-retry-count":
            marked = value.strip() not in (b"", b"0")
        elif name == b"idempotency-key":
            idempotency_key = value.strip() or None
        elif name == b"x-rollwright-agent":
            agent = value.decode("latin-1").strip() or agent
    return RequestHead(key, length, marked, idempotency_key, agent)


def _query_key(query: bytes) -> bytes | None:
    """The key in an address, where some clients of Gemini's API put it."""
    given = next((each[4:] for each in query.split(b"&") if each.startswith(b"key=")), b"")
    return unquote_to_bytes(given) or None


class NamedRequest(NamedTuple):
    """A parsed request with its digest and lengths; computed in a thread if the body is large."""

    asked: ModelRequest
    name: bytes
    """Digest of the request; equal for a repeated one."""
    shown: int
    """Characters that are part of every prompt of this request."""
    length: int
    """Characters of all texts; which of them are in the prompt depends on the model's chat template."""


def name_request(api: ApiFormat, body: bytes, idempotency_key: bytes | None = None) -> NamedRequest:
    """Parses a body."""
    key = (idempotency_key or b"")[:_LONGEST_KEY]
    asked = api.read(body)
    tools = len(encoded_tools(asked.tools)) if asked.tools else 0
    beside = tools + len(asked.instructions)
    return NamedRequest(
        asked,
        blake2b(body, digest_size=16, key=key).digest(),
        shown=beside + sum([len(each.content) for each in asked.messages]),
        length=beside + sum([each.length for each in asked.messages]),
    )


def check_limits(asked: ModelRequest) -> None:
    """Refuses requests above the limits."""
    stops = asked.wishes.stop
    for what, found, most in (
        ("messages", len(asked.messages), MAX_MESSAGES),
        ("tools", len(asked.tools), MAX_TOOLS),
        ("stop texts", len(stops), MAX_STOPS),
        ("characters of the model's name", len(asked.model), LONGEST_MODEL),
        ("characters of a stop text", max(map(len, stops)) if stops else 0, LONGEST_STOP),
    ):
        if found > most:
            raise HttpRefusal(413, "too_large", f"{what}: {found:,} are more than the {most:,} accepted")


def check_room(rollout: RolloutRecorder, named: NamedRequest, agent: str) -> None:
    """Refuses a conversation that is too long by its characters alone: tokenizing it would delay other calls of its
    rollout."""
    room, count, length = rollout.session.sequence_length, len(named.asked.messages), named.length
    most = rollout.session.most_characters(agent)
    if count > room or named.shown > most or length > max(most, room * LONGEST_TOKEN):
        rollout.out_of_room = True
        raise HttpRefusal(
            400,
            "context_length_exceeded",
            f"{count:,} messages of {length:,} characters do not fit: sequence_length is {room}",
        )
