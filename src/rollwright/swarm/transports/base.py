"""The contract of transports: manifests are announced to all peers, content is fetched by its digest.

Invariants of every transport:
- It carries bytes and trusts none of them: manifests are judged by `admission.Admission`, content by `verification`.
- Every call ends by its deadline, whatever the peers do; `announce` and `publish` wait for no peer.
- `fetch` returns content with the requested digest and at most `max_bytes`, or raises `FetchFailed`.
- Its memory is bounded, per peer and in total, so no peer can exhaust it or push the others out.

A node fetches only the groups that it trains on: its traffic grows with the groups it takes, not with the swarm.
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
"""A shared group of eight long answers takes about 25 KB; no node serves or accepts more than this."""

CALL_SECONDS = 10.0
"""Default deadline of a call."""


class FetchProblem(StrEnum):
    """Why a fetch failed."""

    DEADLINE = "deadline"
    """No answer in time."""
    ABSENT = "absent"
    """The peer, or the node that answered for it, does not have the content."""
    TOO_LARGE = "too_large"
    """More bytes than the caller allows."""
    WRONG_DIGEST = "wrong_digest"
    """The answer has another digest; its sender may not be the peer."""
    CLOSED = "closed"
    """The transport is closed or not connected."""


class FetchFailed(RollwrightError):
    """One fetch failed; says nothing about the next."""

    def __init__(self, problem: FetchProblem, digest: str) -> None:
        super().__init__(f"content {digest[:12]}: {problem}")
        self.problem = problem


class Peer(NamedTuple):
    """A peer as the transport sees it. Only a signature proves its id."""

    id: str
    """Hex of its public key."""
    alive: bool
    """Whether the transport believes the peer to be reachable."""
    seen: float
    """Time of the last sign of life, by the transport's clock (`time.time` by default)."""
    verified: bool = False
    """Whether a message signed with its key has arrived; any node can claim that a peer exists."""


class PassedOver(StrEnum):
    """Input that a transport ignored. Junk costs honest nodes nothing, and is counted."""

    UNSIGNED = "unsigned"
    """An unsigned manifest, beyond the few that are kept to be refused with a reason."""
    JUNK_REPLY = "junk_reply"
    """An answer to a fetch with another digest; the fetch goes on waiting for the right one."""
    UNACCEPTABLE_FILE = "unacceptable_file"
    """A link, a pipe, a folder or another user's file in the place of a regular file of the peer."""
    NOT_LISTED = "not_listed"
    """A folder with more entries than one listing reads; the next one continues there."""
    JUNK_GOSSIP = "junk_gossip"
    """A gossip message that is malformed, not signed by its sender, or belongs to no open exchange."""
    TOO_MUCH_GOSSIP = "too_much_gossip"
    """An offer of a peer that was answered in this interval, or of a stranger beyond those that are."""


class Announced(NamedTuple):
    """Manifests announced since a cursor."""

    manifests: Sequence[bytes]
    """In order of arrival, without own ones."""
    cursor: int
    """The cursor for the next call."""
    missed: int
    """Manifests that were dropped unread because there were too many."""
    passed_over: Mapping[str, int] = MappingProxyType({})
    """Other ignored input since the last call, by `PassedOver`."""


class Transport(Protocol):
    """One node's access to its swarm."""

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        """Send a manifest to all peers. The last ones are kept for peers that join later."""
        ...

    async def manifests(self, since: int = 0, deadline: float = CALL_SECONDS) -> Announced:
        """Return the manifests after the cursor `since`, without waiting for any."""
        ...

    async def publish(self, digest: str, content: bytes) -> None:
        """Hold content for peers to fetch, until newer content takes its place."""
        ...

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        """Return the content of that digest; raise `FetchFailed` if it cannot be had."""
        ...

    def peers(self) -> Sequence[Peer]:
        """All known peers but this node, sorted by id."""
        ...

    def prefer(self, peer: str) -> None:
        """Protect a peer, of which a group was accepted, from being pushed out by strangers."""
        ...

    async def close(self) -> None: ...


def digest_of(content: bytes) -> str:
    """The address of content: the hex SHA-256."""
    return sha256(content).hexdigest()


def check_content(content: bytes, digest: str, max_bytes: int) -> bytes:
    """Return the content if it has the digest and size that were asked for."""
    if len(content) > max_bytes:
        raise FetchFailed(FetchProblem.TOO_LARGE, digest)
    if digest_of(content) != digest:
        raise FetchFailed(FetchProblem.WRONG_DIGEST, digest)
    return content


def check_manifest(manifest: bytes) -> bytes:
    """Return the manifest; raise if it is too large for any peer to accept."""
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise RollwrightError(
            f"a manifest of {len(manifest)} bytes is too large to announce; at most {MAX_MANIFEST_BYTES} are accepted"
        )
    return manifest
