"""How nodes reach each other: small manifests are announced to all, content is pulled by its digest.

True of every transport:
- it carries bytes and trusts none of them: a manifest is judged by `manifests.Gate`, content by `verification`;
- every call ends by its deadline, whatever the peers do, and `announce` and `publish` wait for no peer at all;
- what `fetch` returns has the digest that was asked for and at most `max_bytes`, or it raises `FetchFailed`;
- what it holds is bounded, for each peer and over all, so that nobody can fill the memory or push the others out.
So a node needs to fetch only what it trains on: its traffic grows with the groups it takes, not with the swarm.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple, Protocol

from rollwright.errors import RollwrightError

MAX_MANIFEST_BYTES = 2048
"""A signed manifest takes about 400 bytes."""

MAX_CONTENT_BYTES = 4 << 20
"""A shared group of eight long answers takes about 25 KB; nobody has to serve or take more than this."""

CALL_SECONDS = 10.0
"""Deadline of a call that names none."""


class FetchProblem(StrEnum):
    """Why content did not come."""

    DEADLINE = "deadline"
    """Nobody answered in time."""
    ABSENT = "absent"
    """The peer, or whoever answered for it, does not have it."""
    TOO_LARGE = "too_large"
    """More than the caller allows."""
    WRONG_DIGEST = "wrong_digest"
    """What came is not what was asked for; whoever answered may not be the peer."""
    CLOSED = "closed"
    """The transport was closed, or is not connected."""


class FetchFailed(RollwrightError):
    """One piece of content did not come; says nothing about the next."""

    def __init__(self, problem: FetchProblem, digest: str) -> None:
        super().__init__(f"content {digest[:12]}: {problem}")
        self.problem = problem


class Peer(NamedTuple):
    """Who seems to be there. The id is what the transport was told: only a signature proves it."""

    id: str
    """Hex of its public key."""
    alive: bool
    """Whether the transport believes that it is reachable now."""
    seen: float
    """When it was last heard of, in seconds of the transport's clock (`time.time` unless told otherwise)."""
    verified: bool = False
    """Whether something that its key signed was heard; anybody can claim that a peer is there."""


class PassedOver(StrEnum):
    """What a transport came across and did not use. Junk of strangers costs the honest nothing, and is counted."""

    UNSIGNED = "unsigned"
    """A manifest that nobody signed, beyond the few that are kept to be refused by name."""
    JUNK_REPLY = "junk_reply"
    """An answer to a fetch that was not what was asked for; the right one is still waited for."""
    UNACCEPTABLE_FILE = "unacceptable_file"
    """A link, a pipe, a folder, or another user's file where a plain file of the peer belongs."""
    NOT_LISTED = "not_listed"
    """A folder had more entries than are listed at once; the listing of peers goes on there the next time."""


class Announced(NamedTuple):
    """What was announced since a cursor."""

    manifests: Sequence[bytes]
    """In the order in which they came, own ones not among them."""
    cursor: int
    """Give it to the next call."""
    missed: int
    """Manifests that went away before they were read, because there were too many; nothing is dropped in silence."""
    passed_over: Mapping[str, int] = MappingProxyType({})
    """What else was passed over since the call before, by `PassedOver`."""


class Transport(Protocol):
    """One node's access to its swarm."""

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        """Tells all peers, those that come later too, as far as it is among the last ones. Without reachable peers
        it is kept for those who come."""
        ...

    async def manifests(self, since: int = 0, deadline: float = CALL_SECONDS) -> Announced:
        """All that came after the cursor `since`; returns at once, also with nothing."""
        ...

    async def publish(self, digest: str, content: bytes) -> None:
        """Holds content for whoever fetches it, until newer content takes its place."""
        ...

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        """The content of that digest; raises `FetchFailed`."""
        ...

    def peers(self) -> Sequence[Peer]:
        """Everybody heard of, without oneself, sorted by id."""
        ...

    def prefer(self, peer: str) -> None:
        """A group of this peer held up: however many strangers come, they do not push it out."""
        ...

    async def close(self) -> None: ...


def digest_of(content: bytes) -> str:
    """What content is asked for by: the hex of its SHA-256."""
    return sha256(content).hexdigest()


def checked_content(content: bytes, digest: str, max_bytes: int) -> bytes:
    """The content, if it is what was asked for."""
    if len(content) > max_bytes:
        raise FetchFailed(FetchProblem.TOO_LARGE, digest)
    if digest_of(content) != digest:
        raise FetchFailed(FetchProblem.WRONG_DIGEST, digest)
    return content


def checked_manifest(manifest: bytes) -> bytes:
    """Refuses to announce what no peer would take."""
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise RollwrightError(
            f"a manifest of {len(manifest)} bytes is too large to announce; at most {MAX_MANIFEST_BYTES} are accepted"
        )
    return manifest
