"""When steps are forgotten, which, and that a record goes on from what is forgotten as from the whole."""

from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import FormatError
from rollwright.rollout.accounting import Fate, Ledger
from rollwright.run.retention import (
    FORGOTTEN,
    Forgotten,
    Position,
    lowest_index,
    next_cut,
    read_forgotten,
    write_forgotten,
)
from rollwright.run.training_record import TrainingRecord, forgotten_with
from rollwright.training.pipeline import LengthBias

NAMES = st.text("abg-0123\n", min_size=1, max_size=6)
BATCHES = st.lists(st.lists(NAMES, max_size=4), max_size=12)


def rows(batches: list[list[str]], first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "mode": "train",
            "step": step,
            "groups": groups,
            "trajectories": len(groups),
            "own": 1,
            "tokens": step,
        }
        for step, groups in enumerate(batches, first)
    ]


@given(BATCHES, st.data())
def test_a_record_that_forgets_has_the_places_of_one_that_does_not(
    batches: list[list[str]], data: st.DataObject
) -> None:
    whole, forgetting = TrainingRecord(), TrainingRecord()
    for row in rows(batches):
        whole.append(row)
        forgetting.append(row)
        forgetting.forget(data.draw(st.integers(forgetting.start.step, forgetting.steps)))
        reopened = TrainingRecord(forgetting.rows, forgetting.start)
        for record in (forgetting, reopened):
            assert record.steps == whole.steps
            for step in range(record.start.step, record.steps + 1):
                place = record.position(step)
                assert place == whole.position(step)
                assert record.check(asdict(place), "it") == step
                assert record.since(step) == whole.since(step)


@given(BATCHES, BATCHES)
def test_places_of_different_records_differ(batches: list[list[str]], others: list[list[str]]) -> None:
    plain = [[each.replace("\n", "") for each in groups] for groups in batches]
    other = [[each.replace("\n", "") for each in groups] for groups in others]
    one, two = TrainingRecord(rows(plain)), TrainingRecord(rows(other))
    assert (one.position(one.steps) == two.position(two.steps)) == (plain == other)


def test_a_checkpoint_of_another_record_or_of_a_forgotten_step_is_refused() -> None:
    record = TrainingRecord(rows([["a"], ["b"], ["c"]]))
    places = [asdict(record.position(step)) for step in range(4)]
    other = TrainingRecord(rows([["a"], ["x"], ["c"]]))
    assert other.check(places[1], "it") == 1
    for kept in (places[2], places[3], {}, {**places[1], "step": "1"}, {**places[1], "step": 9}):
        with pytest.raises(FormatError, match="it: the batches that this checkpoint was trained on"):
            other.check(kept, "it")
    record.forget(2)
    with pytest.raises(FormatError, match="are not those of the record"):
        record.check(places[1], "it")
    with pytest.raises(ValueError, match="step 1 is not in the record, which has 2 to 3"):
        record.position(1)


def test_a_checkpoint_from_before_records_could_be_forgotten_is_read_as_long_as_nothing_is() -> None:
    record = TrainingRecord(rows([["a", "b"], ["c"]]))
    kept = {"step": 2, "groups": 3, "digest": sha256(b"a\nb\nc").hexdigest()}
    assert record.check(kept, "it") == 2
    with pytest.raises(FormatError):
        record.check({**kept, "digest": sha256(b"a\nb\nd").hexdigest()}, "it")
    record.forget(1)
    with pytest.raises(FormatError):
        record.check(kept, "it")


@given(
    keep=st.integers(1, 9), every=st.integers(1, 7), checkpoints=st.integers(1, 4), steps=st.integers(1, 120)
)
def test_between_keep_and_twice_as_many_steps_stay_and_all_since_the_oldest_checkpoint(
    keep: int, every: int, checkpoints: int, steps: int
) -> None:
    forgotten, written, cuts = 0, 0, 0
    for done in range(every, steps + 1, every):
        oldest = max(every, done - (checkpoints - 1) * every)
        cut = next_cut(keep, forgotten=forgotten, done=done, oldest_checkpoint=oldest)
        if cut is not None:
            assert cut - forgotten >= keep
            assert cut <= oldest
            assert done - cut >= keep
            forgotten, cuts = cut, cuts + 1
            written += done - cut
        assert done - forgotten <= max(keep, (checkpoints - 1) * every) + keep + every
    if cuts and every * (checkpoints - 1) <= keep:
        assert written <= steps, "what stays is not written anew more often than once for each step"


def test_without_a_number_nothing_is_forgotten() -> None:
    assert next_cut(None, forgotten=0, done=10**6, oldest_checkpoint=10**6) is None


def test_what_is_forgotten_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_forgotten(tmp_path) == Forgotten()
    ledger = Ledger(reasons={"filtered: overlong": 3})
    ledger.counts[Fate.DELIVERED] = 12
    ledger.catches.add("overlong", "a.train-g1-m0", 4)
    told = Forgotten(
        "a", Position(7, 20, "ab"), 9, ("a.train-g11",), frozenset({"x", "y"}), ledger, LengthBias(1, 2, 3, 4)
    )
    write_forgotten(tmp_path, told)
    assert read_forgotten(tmp_path) == told
    assert [each.name for each in tmp_path.iterdir()] == [FORGOTTEN]


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 1, "name": "a", "position": 3}'])
def test_a_file_that_says_something_else_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    (tmp_path / FORGOTTEN).write_text(content)
    with pytest.raises(FormatError, match=FORGOTTEN):
        read_forgotten(tmp_path)


def test_what_is_forgotten_is_told_by_the_names_of_groups() -> None:
    gone = Forgotten("a.b-1", Position(7, 20, "ab"), 9, ("a.b-1.train-g11",), frozenset({"swarm-1-2"}))
    for group in ("a.b-1.train-g8", "a.b-1.train-g0", "a.b-1.val6-g0", "a.b-1.val0-g900", "swarm-1-2"):
        assert gone.has_group(group)
        assert gone.has_rollout(f"{group}-m3")
    others = ("train-g9", "train-g10", "val7-g0", "val70-g0", "train", "train-gx", "val-g1")
    for group in (*(f"a.b-1.{each}" for each in others), "swarm-1-3", "a.b.train-g1", "xa.b-1.train-g1", ""):
        assert not gone.has_group(group)
    assert not Forgotten("a").has_group("a.train-g0")


def test_groups_of_forgotten_steps_above_the_floor_stay_known_as_handed_out() -> None:
    """In an asynchronous run a later group may be handed out before an earlier one."""
    batches = [["a.train-g1", "peer"], ["a.train-g4", "a.train-g2"], ["a.train-g0"], ["a.train-g3"]]
    record, gone = TrainingRecord(rows(batches)), Forgotten("a")

    def forget(cut: int) -> Forgotten:
        floor = lowest_index("a", record.since(cut))
        assert floor is not None
        ledger = Ledger()
        ledger.move(Fate.RUNNING, Fate.DELIVERED)
        found = forgotten_with(gone, record, cut, floor=floor, settled=ledger, generated=[10], played=True)
        record.forget(cut)
        return found

    gone = forget(1)
    assert (gone.floor, gone.delivered, gone.foreign) == (0, ("a.train-g1",), frozenset({"peer"}))
    gone = forget(3)
    assert (gone.floor, gone.delivered, gone.foreign) == (3, ("a.train-g4",), frozenset())
    assert gone.ledger.counts[Fate.DELIVERED] == 2
    assert gone.bias == LengthBias(generated=2, generated_tokens=20, trained=3, trained_tokens=0 + 1 + 2)
