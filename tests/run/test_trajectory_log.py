"""Checksums that undo a wrong byte, rows and logs that lose what is damaged and nothing else."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import FormatError
from rollwright.run.log_records import HEAD, LogCondition, corrected, crc32, framed, records
from rollwright.run.sealed_rows import read_rows, read_sealed, seal
from rollwright.run.trajectory_log import DAMAGED, TrajectoryLog
from rollwright.trajectory import Trajectory


@given(st.binary(min_size=1, max_size=400), st.data())
def test_any_one_wrong_byte_is_put_right(data: bytes, draw: st.DataObject) -> None:
    place, wrong = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(1, 255))
    damaged = bytearray(data)
    damaged[place] ^= wrong
    assert corrected(bytes(damaged), crc32(data)) == data


ROWS: list[dict[str, Any]] = [
    {"mode": "train", "step": step, "groups": [f"lake.train-g{step}"], "reward": step / 7}
    for step in range(3)
]
LINES = "".join(seal(row) + "\n" for row in ROWS).encode()


@given(st.integers(0, len(LINES) - 1), st.integers(1, 255))
@settings(max_examples=200)
def test_a_wrong_byte_in_a_file_of_rows_costs_no_row_and_is_told(
    tmp_path_factory: pytest.TempPathFactory, place: int, wrong: int
) -> None:
    file = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    content = bytearray(LINES)
    content[place] ^= wrong
    file.write_bytes(bytes(content))
    found = read_rows(file)
    assert found.rows == ROWS
    assert found.mended
    assert all(str(file) in line for line in found.told())


@given(st.integers(0, len(LINES) - 8), st.binary(min_size=2, max_size=8))
@settings(max_examples=200)
def test_rows_are_given_as_they_were_written_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, place: int, garbage: bytes
) -> None:
    file = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    file.write_bytes(LINES[:place] + garbage + LINES[place + len(garbage) :])
    found = read_rows(file)
    assert all(row in ROWS for row in found.rows)
    assert len(found.rows) >= 1  # two lines at most are touched


def test_a_file_of_rows_that_an_older_release_wrote_is_read_and_names_a_garbage_line(tmp_path: Path) -> None:
    file = tmp_path / "failures.jsonl"
    file.write_text('{"rollout_id": "a", "reason": "x"}\n!garbage\n{"rollout_id": "b", "reason": "y"}\n{"rol')
    found = read_rows(file)
    assert [row["rollout_id"] for row in found.rows] == ["a", "b"]
    assert [number for number, _ in found.damaged] == [2]
    assert found.cut_off
    assert list(found.told()) == [
        f"{file}: line 2 cannot be read and is left out",
        f"{file}: ends with half a line, which is left out",
    ]


def test_an_object_in_a_file_of_its_own_is_mended_or_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    whole = (seal({"name": "lake", "error": None}, indent=2) + "\n").encode()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert read_sealed(file) == ({"name": "lake", "error": None}, True)
    file.write_bytes(whole[:20])
    with pytest.raises(FormatError, match=r"summary.json: is damaged"):
        read_sealed(file)


def trajectory(number: int) -> Trajectory:
    group = f"lake.train-g{number}"
    return Trajectory(f"{group}-m0", "1", group, "FrozenLake", random.Random(number).getrandbits(60))


ALL = [trajectory(number) for number in range(8)]
FRAMES = [framed(each.to_bytes()) for each in ALL]


def write(place: Path, content: bytes) -> Path:
    file = place / "trajectories.rwlog"
    file.write_bytes(content)
    return file


def read(file: Path) -> tuple[list[Trajectory], LogCondition]:
    condition = LogCondition()
    with file.open("rb") as log:
        return [Trajectory.from_bytes(each) for each in records(log, condition)], condition


@given(st.integers(0, sum(map(len, FRAMES)) + len(HEAD) - 1), st.integers(1, 255))
@settings(max_examples=200)
def test_a_wrong_byte_anywhere_in_a_log_costs_no_record(
    tmp_path_factory: pytest.TempPathFactory, place: int, wrong: int
) -> None:
    content = bytearray(HEAD + b"".join(FRAMES))
    content[place] ^= wrong
    found, condition = read(write(tmp_path_factory.mktemp("log"), bytes(content)))
    assert found == ALL
    assert condition.mended == 1
    assert not condition.damaged
    assert not condition.cut_off


@given(st.integers(0, 6), st.data())
@settings(max_examples=200)
def test_damage_costs_the_records_it_is_in_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, number: int, draw: st.DataObject
) -> None:
    """Lengths included: wherever in a record the damage is, all others are found."""
    frame = FRAMES[number]
    size = draw.draw(st.integers(2, min(40, len(frame))))
    start = draw.draw(st.integers(0, len(frame) - size))
    garbage = draw.draw(st.binary(min_size=size, max_size=size))
    damaged = frame[:start] + garbage + frame[start + size :]
    content = HEAD + b"".join([*FRAMES[:number], damaged, *FRAMES[number + 1 :]])
    place = tmp_path_factory.mktemp("log")
    file = write(place, content)
    found, _ = read(file)
    others = [each for each in ALL if each is not ALL[number]]
    assert [each for each in found if each != ALL[number]] == others
    log, condition = TrajectoryLog.reopen(file)
    log.append("lake.more-m0", trajectory(9).to_bytes())
    log.close()
    again, after = read(file)
    assert [each for each in again[:-1] if each != ALL[number]] == others
    assert after.whole
    if condition.damaged:
        assert garbage in (place / DAMAGED).read_bytes() or len(found) == len(ALL)
        assert any(str(file) in line for line in condition.told(file))


@given(st.integers(0, sum(map(len, FRAMES)) + len(HEAD)))
@settings(max_examples=100)
def test_a_log_that_is_cut_anywhere_keeps_all_whole_records_and_takes_more(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    file = write(tmp_path_factory.mktemp("log"), (HEAD + b"".join(FRAMES))[:length])
    ends = [len(HEAD) + sum(map(len, FRAMES[: number + 1])) for number in range(len(FRAMES))]
    whole = sum(end <= length for end in ends)
    log, condition = TrajectoryLog.reopen(file)
    assert log.rollouts == [each.rollout_id for each in ALL[:whole]]
    assert condition.cut_off == (length not in (len(HEAD), *ends))
    log.append(ALL[7].rollout_id, ALL[7].to_bytes())
    kept = log.read([each.rollout_id for each in ALL])
    assert {Trajectory.from_bytes(each).rollout_id for each in kept.values()} == set(log.rollouts)
    log.close()
    assert read(file)[1].whole


def test_a_log_whose_end_was_never_written_to_the_disk_reads_up_to_there(tmp_path: Path) -> None:
    """A power cut may leave a file longer than what was flushed: zeros."""
    file = write(tmp_path, HEAD + FRAMES[0] + bytes(5000))
    found, condition = read(file)
    assert found == ALL[:1]
    assert condition.cut_off
    assert not condition.damaged


def test_two_damaged_records_in_a_row_are_one_damaged_place_and_the_rest_is_read(tmp_path: Path) -> None:
    content = bytearray(HEAD + b"".join(FRAMES))
    start = len(HEAD) + len(FRAMES[0]) + 20
    content[start : start + len(FRAMES[1])] = os.urandom(len(FRAMES[1]))
    found, condition = read(write(tmp_path, bytes(content)))
    assert found == [ALL[0], *ALL[3:]]
    assert (condition.damaged, condition.first_damage) == (1, len(HEAD) + len(FRAMES[0]))


def test_what_is_no_log_at_all_is_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path, os.urandom(3000))
    with pytest.raises(FormatError, match=r"trajectories.rwlog: is not a trajectory log"):
        TrajectoryLog.reopen(file)
