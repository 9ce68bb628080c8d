"""Reward components, return value and conversation are stored compatibly with release 0.1.0."""

import math
from base64 import b64decode

import msgspec
import pytest
import zstandard

from rollwright.errors import FormatError
from rollwright.trajectory import Message, StopReason, Trajectory, check_rewards

WRITTEN_BY_0_1_0 = b64decode(
    "UldUASi1L/1kWAElDAAW2E82YGmTDsA9HAhALMAboMMqJd3UmuDAOh8DdrTBRmhL0my5GW9FSFpyA8J+iAeeBkEGbmKLaLcMQQBAAEMA"
    "cc9RYoh+76fMBL35gSV/dKUGEOe5d6gTgfazdAUswfsCXQSUwzqC4UTNNWDUdSYMBqF3M4qxUXONjvo8upSBrAi8b5hUMnNhYQZd6Ogz"
    "yUwAy8LNNdofCDGmZOYiM9e6sC6kJLi9t+OTxL4bFsnmogJZAeG3sSMK8dQ1a9gzg1IC7T3iOWiTFktCZlYYZC4uAzJTwLoEWJbMBWP0"
    "1DXDJElRqR76Ye9wygkLVVvm8JW0409ycEiZjjrBGLXjLa2EPOCnLk3TNE1DYaH6xmZ7CL0pD+e5SaVynj7Sg+8gZB6oGL458mDGbR+a"
    "KBpvyg4+AtRmaYL5DBN5mmhv9hy0b6pCGgCGK4TJZt+wZsx5F8ZNAjmeBdjTDBjiZQWBmdfQsMtipDLOmEwfYA4QBkOozCBwCd6uMjBu"
    "QmLGxlneoHMicc0x7fUPxw=="
)
"""Two turns with outcomes, metrics and a penalty."""

HEADER = 4
"""Bytes of the magic word and the format version."""

decompress = zstandard.ZstdDecompressor().decompress


def test_a_record_of_release_0_1_0_is_read_and_has_no_components() -> None:
    old = Trajectory.from_bytes(WRITTEN_BY_0_1_0)
    assert (old.rollout_id, old.stop, old.reward, old.penalties) == (
        "r1",
        StopReason.TERMINATED,
        1.75,
        {"long": -0.5},
    )
    assert (old.components, old.returned, old.conversation) == ({}, None, ())


def test_a_record_without_the_new_fields_has_the_same_bytes_as_before() -> None:
    written = Trajectory.from_bytes(WRITTEN_BY_0_1_0).to_bytes()
    assert written[:HEADER] == WRITTEN_BY_0_1_0[:HEADER]
    # Compared uncompressed, because zstd releases compress differently.
    assert decompress(written[HEADER:]) == decompress(WRITTEN_BY_0_1_0[HEADER:])


def test_components_returned_value_and_conversation_survive_bytes_in_their_order() -> None:
    old = Trajectory.from_bytes(WRITTEN_BY_0_1_0)
    new = msgspec.structs.replace(
        old,
        components={"style": 0.25, "correct": 1.0, "judge.tone": -0.5},
        returned='{"answer": 4}',
        conversation=(Message("user", "2+2?"), Message("assistant", "4")),
    )
    again = Trajectory.from_bytes(new.to_bytes())
    assert again == new
    assert list(again.components) == ["style", "correct", "judge.tone"]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_component_that_is_no_reward_is_refused_by_its_name(value: float) -> None:
    trajectory = Trajectory("r1", "a1", "g1", "Arithmetic", 0, components={"correct": 1.0, "style": value})
    with pytest.raises(FormatError, match="r1: the reward component 'style'"):
        check_rewards(trajectory)
