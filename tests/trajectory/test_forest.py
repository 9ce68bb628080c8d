"""The forest stores exactly the prompt of each call, in space linear in the turns."""

import contextlib
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import FormatError
from rollwright.trajectory import (
    NO_VERSION,
    Outcome,
    Trajectory,
    Turn,
    VersionRun,
    floats,
    full_prompt,
    leaves,
    merge,
    samples,
    split,
    token_ids,
    turn_samples,
    turn_weights,
)

Calls = list[tuple[array, array]]
"""Prompt and completion of each call, as the engine saw them."""


@st.composite
def played(draw: st.DrawFn) -> tuple[Trajectory, Calls]:
    """A random forest, grown call by call, with a separate record of each call's prompt."""
    ids = st.lists(st.integers(0, 60_000), max_size=5)
    calls: Calls = []
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 9))):
        after = draw(st.none() | st.integers(0, number - 1)) if number else None
        extends = draw(st.none() | st.integers(0, number - 1)) if number else None
        added = token_ids(draw(ids))
        sampled = token_ids(draw(ids))
        before = token_ids() if extends is None else calls[extends][0] + calls[extends][1]
        calls.append((before + added, sampled))
        cut = draw(st.integers(0, len(sampled)))
        runs = tuple(VersionRun(v, n) for v, n in ((3, cut), (4, len(sampled) - cut)) if n)
        turns.append(
            Turn(
                id=number,
                after=after,
                extends=extends,
                prompt_ids=added,
                sampled_ids=sampled,
                logprobs=floats(-float(each % 7) for each in sampled),
                versions=runs,
                text=f"turn {number}",
                completion_tokens=len(sampled),
                outcome=Outcome(observation="seen", reward=float(number), penalty=-0.5),
            )
        )
    trajectory = Trajectory("run.train-g0-m0", "at-1", "run.train-g0", "FrozenLake", seed=5, turns=turns)
    return trajectory, calls


@given(played())
def test_joining_a_path_gives_the_exact_prompt_and_completion_of_every_call(
    both: tuple[Trajectory, Calls],
) -> None:
    trajectory, calls = both
    for turn, (prompt, completion) in zip(trajectory.turns, calls, strict=True):
        assert full_prompt(trajectory.turns, turn.id) == prompt
        assert turn.sampled_ids == completion


@given(played())
def test_split_then_merge_is_the_identity(both: tuple[Trajectory, Calls]) -> None:
    trajectory, _ = both
    parts = split(trajectory)
    assert len(parts) == len(leaves(trajectory.turns))
    assert merge(parts) == trajectory
    assert merge(reversed(parts)) == trajectory


@given(played())
def test_every_sampled_id_has_mask_one_in_exactly_one_sample(both: tuple[Trajectory, Calls]) -> None:
    trajectory, calls = both
    for view in (samples(trajectory), turn_samples(trajectory)):
        trained = [span.turn for row in view for span in row.spans if span.trained]
        assert sorted(trained) == list(range(len(calls)))
        for row in view:
            expected = bytearray(len(row.token_ids))
            for span in row.spans:
                assert row.token_ids[span.start : span.stop] == calls[span.turn][1]
                expected[span.start : span.stop] = bytes([span.trained]) * (span.stop - span.start)
            assert row.mask == bytes(expected)


@given(played())
def test_a_row_is_what_the_model_saw_with_its_logprobs_and_versions_in_place(
    both: tuple[Trajectory, Calls],
) -> None:
    trajectory, calls = both
    for row in samples(trajectory) + turn_samples(trajectory):
        last = row.spans[-1]
        assert row.token_ids == calls[last.turn][0] + calls[last.turn][1]
        sampled = bytearray(len(row.token_ids))
        for span in row.spans:
            turn = trajectory.turns[span.turn]
            sampled[span.start : span.stop] = b"\1" * (span.stop - span.start)
            assert row.logprobs[span.start : span.stop] == turn.logprobs
            assert row.versions[span.start : span.stop].count(3) == sum(
                r.count for r in turn.versions if r.version == 3
            )
        for place, was_sampled in enumerate(sampled):
            assert was_sampled or (row.versions[place] == NO_VERSION and row.logprobs[place] == 0)
        assert len(row.weights) == len(row.mask) == len(row.token_ids)


@given(played())
def test_the_weights_of_the_leaves_sum_to_one(both: tuple[Trajectory, Calls]) -> None:
    trajectory, _ = both
    weights = turn_weights(trajectory.turns)
    assert sum(weights[leaf] for leaf in leaves(trajectory.turns)) == pytest.approx(1.0)


@given(played())
def test_bytes_and_back_is_the_identity(both: tuple[Trajectory, Calls]) -> None:
    trajectory, _ = both
    assert Trajectory.from_bytes(trajectory.to_bytes()) == trajectory


def chain(turns: int, tokens: int = 50) -> Trajectory:
    return Trajectory(
        "r",
        "a",
        "g",
        "FrozenLake",
        seed=0,
        turns=[
            Turn(
                id=i,
                after=i - 1 if i else None,
                extends=i - 1 if i else None,
                prompt_ids=token_ids(range(i, i + tokens)),
                sampled_ids=token_ids(range(tokens)),
                logprobs=floats([-1.0] * tokens),
                versions=(VersionRun(0, tokens),),
                outcome=Outcome("o", reward=1.0, penalty=-0.25),
            )
            for i in range(turns)
        ],
    )


def test_a_chain_is_one_sample_and_one_row_for_each_turn() -> None:
    trajectory = chain(4)
    assert [len(row.token_ids) for row in samples(trajectory)] == [400]
    assert [len(row.token_ids) for row in turn_samples(trajectory)] == [100, 200, 300, 400]
    assert turn_weights(trajectory.turns) == [1.0] * 4


def test_the_reward_of_a_tree_is_the_mean_over_its_leaves_and_penalties_stay_apart() -> None:
    trajectory = chain(3)
    assert (trajectory.reward, trajectory.penalty, trajectory.score) == (3.0, -0.75, 2.25)
    sibling = msgspec.structs.replace(trajectory.turns[2], id=3, outcome=Outcome("o", reward=5.0))
    trajectory.turns.append(sibling)
    assert trajectory.reward == pytest.approx((3.0 + 7.0) / 2)


def test_the_size_is_linear_in_the_turns() -> None:
    def stored(trajectory: Trajectory) -> int:
        return sum(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in trajectory.turns)

    assert stored(chain(64)) == 16 * stored(chain(4))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a trajectory"),
        (b"PK\x03\x04zip", "not a trajectory"),
        (b"RWT", "format version None"),
        (b"RWT\x09rest", "format version 9 is unknown; this release reads 1"),
        (b"RWT\x01garbage", "damaged trajectory"),
    ],
)
def test_foreign_bytes_are_refused_in_one_line(data: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says) as caught:
        Trajectory.from_bytes(data)
    assert "\n" not in str(caught.value)


@given(st.data())
def test_damaged_bytes_never_do_anything_but_raise_a_format_error(data: st.DataObject) -> None:
    whole = bytearray(chain(2).to_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FormatError):
        Trajectory.from_bytes(bytes(whole))


def test_a_small_file_that_would_swell_is_refused() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(300 * 1024 * 1024))
    with pytest.raises(FormatError, match="declares 314572800 bytes uncompressed; the limit is"):
        Trajectory.from_bytes(b"RWT\x01" + bomb)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": 7}, "has id 7"),
        ({"after": 1}, "not an earlier one"),
        ({"extends": -1}, "not an earlier one"),
        ({"logprobs": floats([0.0])}, "50 sampled ids but 1 log-probabilities"),
        ({"versions": (VersionRun(0, 49),)}, "version stamps do not cover"),
    ],
)
def test_an_inconsistent_forest_is_refused_with_the_turn_named(change: dict[str, object], says: str) -> None:
    trajectory = chain(2)
    trajectory.turns[1] = msgspec.structs.replace(trajectory.turns[1], **change)
    with pytest.raises(FormatError, match=rf"turn 1.*{says}"):
        Trajectory.from_bytes(trajectory.to_bytes())


def test_text_without_ids_is_not_trainable_and_says_why() -> None:
    trajectory = chain(1)
    assert trajectory.not_trainable is None
    trajectory.turns[0] = Turn(id=0, after=None, extends=None, text="hi", exact=False)
    assert trajectory.not_trainable == "the engine returned no exact token ids and log-probabilities"


def test_bytes_are_read_as_small_integers_not_as_machine_words() -> None:
    assert token_ids(b"abcd").tolist() == token_ids(b"abcde").tolist()[:4] == [97, 98, 99, 100]
