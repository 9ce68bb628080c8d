"""The content of a shared group: the recipe of its task and the actions, never the task or its scorer.

A group carries its recipe and, for each member, the actions as text and token ids, and the claimed reward. It contains no
question, answer key, test or scorer: the receiver makes all of these from the recipe. Decoding is bounded in bytes, items,
depth and lengths before any object is built.
"""

import math
from typing import Annotated

import msgspec

from rollwright.errors import FormatError, RollwrightError
from rollwright.swarm.msgpack_guard import check_shape
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.signed import MAX_GROUP, PROTOCOL, Count, Hex32, Name
from rollwright.swarm.transports.base import MAX_CONTENT_BYTES
from rollwright.trajectory import FinishReason, TokenIds, Trajectory, token_ids
from rollwright.trajectory.arrays import pack, unpack

MAX_TEXT = 32_768
"""Characters of one completion, about 8,000 tokens. Parsing the action out of an adversarial text takes 2 s at this length,
and grows with its square."""

MAX_IDS = 32_768
"""Token ids of one completion."""

MAX_TURNS = 256
"""Actions of one episode."""

_MAX_ITEMS = 32_768
"""Values in a group: 64 members of 100 turns each fit, and checking that many takes some tens of milliseconds."""

_MAX_DEPTH = 5
"""Group, members, member, turns, turn."""

_ID_BYTES = 4


class Recipe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The coordinates from which a node makes the task."""

    env: Name
    env_version: Name
    seed: Count
    """The peer's own seed, see `recipes.task_seed`; any other is refused."""
    index: Count
    """Number of the task in the seed's stream."""
    task: Hex32
    """Digest of the first observation: shows whether both nodes have the same task without revealing it."""


class SharedAction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One completion."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    ids: Annotated[bytes, msgspec.Meta(max_length=MAX_IDS * _ID_BYTES)]
    """The sampled token ids, 32 bits each, little-endian; empty if the peer's engine gave none."""
    finish: FinishReason

    @property
    def token_ids(self) -> TokenIds:
        return token_ids(int(each) for each in unpack("i", self.ids))


class SharedMember(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One episode."""

    actions: Annotated[tuple[SharedAction, ...], msgspec.Meta(min_length=1, max_length=MAX_TURNS)]
    reward: float
    """As claimed, without format penalties."""


class SharedGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group on the wire."""

    protocol: int
    peer: Hex32
    """The peer that played it; the manifest with its digest is signed with this key."""
    recipe: Recipe
    tokenizer: Annotated[str, msgspec.Meta(max_length=128)]
    """Digest of the tokenizer that the ids belong to."""
    members: Annotated[tuple[SharedMember, ...], msgspec.Meta(min_length=2, max_length=MAX_GROUP)]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(member.reward for member in self.members)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SharedGroup)


def encode(group: SharedGroup) -> bytes:
    return _encoder.encode(group)


def head_of(peer: str) -> bytes:
    """The first bytes of every group of this peer."""
    return b"\x95" + _encoder.encode(PROTOCOL) + _encoder.encode(peer)  # an array of five


def decode(data: bytes) -> SharedGroup:
    """Decode a group; raise `PeerRefused` unless it is within the limits and canonically encoded."""
    if len(data) > MAX_CONTENT_BYTES:
        raise PeerRefused(
            PeerRefusal.TOO_LARGE, f"{len(data)} bytes; at most {MAX_CONTENT_BYTES} are accepted"
        )
    try:
        check_shape(data, max_items=_MAX_ITEMS, max_depth=_MAX_DEPTH)
        group = _decoder.decode(data)
    except (msgspec.MsgspecError, FormatError, ValueError) as error:
        raise PeerRefused(PeerRefusal.MALFORMED_CONTENT, str(error)) from error
    if group.protocol != PROTOCOL:
        raise PeerRefused(
            PeerRefusal.OTHER_PROTOCOL, f"version {group.protocol}, this release speaks {PROTOCOL}"
        )
    if not all(map(math.isfinite, group.rewards)) or _encoder.encode(group) != data:
        raise PeerRefused(PeerRefusal.MALFORMED_CONTENT, "not the canonical encoding of its fields")
    if any(len(action.ids) % _ID_BYTES for member in group.members for action in member.actions):
        raise PeerRefused(PeerRefusal.MALFORMED_CONTENT, f"token ids are not a multiple of {_ID_BYTES} bytes")
    return group


def shared_member(trajectory: Trajectory) -> SharedMember:
    """Convert a trajectory to its wire form; only a chain of turns can be replayed from its actions."""
    after = [turn.after for turn in trajectory.turns]
    if after != [None, *range(len(after) - 1)] or trajectory.error is not None:
        raise RollwrightError(
            f"rollout {trajectory.rollout_id} cannot be shared: only complete episodes along one path can"
        )
    if whys := trajectory.never_trained():
        # A sample that this node would not train on itself must not reach others as an honest one.
        raise RollwrightError(f"rollout {trajectory.rollout_id} cannot be shared: {whys[0]}")
    actions = tuple(
        SharedAction(
            text=turn.text.encode(errors="replace").decode(),
            ids=pack(turn.sampled_ids) if turn.exact else b"",
            finish=turn.finish,
        )
        for turn in trajectory.turns
    )
    return SharedMember(actions, trajectory.reward)
