"""What is shared of a group: where its task comes from, and what was done, never what is right.

A group carries its recipe and, for each member, the actions in text and token ids and the reward it claims. There is
no question in it, no answer key, no test and no scorer: the receiver makes all of these from the recipe. Reading one
is bounded in bytes, items, depth and lengths before anything is made of it.
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
from rollwright.trajectory.tokens import pack, unpack

MAX_TEXT = 32_768
"""Characters of one completion: about 8,000 tokens. Finding the action in a text made to be slow takes 2 s at this length,
and four times as long at twice the length."""

MAX_IDS = 32_768
"""Token ids of one completion."""

MAX_TURNS = 256
"""Actions of one episode."""

_MAX_ITEMS = 32_768
"""Values in a group: 64 members of 100 turns each fit, and looking that many over takes some tens of milliseconds."""

_MAX_DEPTH = 5
"""Group, members, member, turns, turn."""

_ID_BYTES = 4


class Recipe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to make the task again."""

    env: Name
    env_version: Name
    seed: Count
    """The peer's own, see `recipes.task_seed`: any other is refused."""
    index: Count
    """Which task of that seed."""
    task: Hex32
    """Digest of what the environment showed first: tells whether both see the same task, and not what it is."""


class SharedAction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One completion."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    ids: Annotated[bytes, msgspec.Meta(max_length=MAX_IDS * _ID_BYTES)]
    """The sampled token ids, 32 bits each, little-endian; empty: the peer's engine gave none."""
    finish: FinishReason

    @property
    def token_ids(self) -> TokenIds:
        return token_ids(int(each) for each in unpack("i", self.ids))


class SharedMember(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One episode."""

    actions: Annotated[tuple[SharedAction, ...], msgspec.Meta(min_length=1, max_length=MAX_TURNS)]
    reward: float
    """As claimed; without format penalties."""


class SharedGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group as it travels."""

    protocol: int
    peer: Hex32
    """Who made it; the manifest that names its digest is signed with this key."""
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
    """What every group that this peer made begins with."""
    return b"\x95" + _encoder.encode(PROTOCOL) + _encoder.encode(peer)  # an array of five


def decode(data: bytes) -> SharedGroup:
    """Raises `PeerRefused` for anything that is not a whole group within the limits, in the one form that it has."""
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
        raise PeerRefused(PeerRefusal.MALFORMED_CONTENT, "not the one form that this group has")
    if any(len(action.ids) % _ID_BYTES for member in group.members for action in member.actions):
        raise PeerRefused(PeerRefusal.MALFORMED_CONTENT, f"token ids are not a multiple of {_ID_BYTES} bytes")
    return group


def shared_member(trajectory: Trajectory) -> SharedMember:
    """A member as it travels; only an episode that went along one path can be played again from its actions."""
    after = [turn.after for turn in trajectory.turns]
    if after != [None, *range(len(after) - 1)] or trajectory.error is not None:
        raise RollwrightError(
            f"rollout {trajectory.rollout_id} cannot be shared: only whole episodes along one path can"
        )
    if whys := trajectory.never_trained():
        # What this node would not train on itself, nobody should be given as an honest sample.
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
