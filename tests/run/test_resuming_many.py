"""What a resumed run reads of its finished part is read as a stream, and is the same as if it were read at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.rollout.stream import CompletionsRead, rollout_ids
from rollwright.run.sealed_rows import SealedRows, check_rows, iterate_rows, read_rows, seal
from rollwright.store.memory import MemoryStore
from rollwright.store.records import AttemptStatus, CompletionEntry
from rollwright.trajectory import Trajectory

ROWS: list[dict[str, Any]] = [
    {"rollout_id": f"r{number}", "used": [], "value": float("nan") if number == 3 else number}
    for number in range(8)
]


def write(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


CONTENT = "".join(seal(row) + "\n" for row in ROWS).encode()


@given(at=st.integers(0, len(CONTENT) - 1), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_rows_are_the_same_one_by_one_and_together(
    tmp_path_factory: pytest.TempPathFactory,
    at: int,
    value: int,
    cut: int,
) -> None:
    damaged = bytearray(CONTENT)
    damaged[at] = value
    file = write(tmp_path_factory.mktemp("rows") / "rows.jsonl", bytes(damaged[: len(damaged) - cut]))
    together, found = read_rows(file), SealedRows(file)
    assert json.dumps(list(iterate_rows(found))) == json.dumps(together.rows)
    assert (found.mended, found.damaged, found.cut_off) == (
        together.mended,
        together.damaged,
        together.cut_off,
    )


@given(at=st.integers(0, len(CONTENT) - 1), value=st.integers(0, 255))
def test_a_changed_byte_is_found_without_decoding_and_the_rows_are_there_to_rewrite_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    at: int,
    value: int,
) -> None:
    damaged = bytearray(CONTENT)
    damaged[at] = value
    file = write(tmp_path_factory.mktemp("rows") / "rows.jsonl", bytes(damaged))
    checked, read = check_rows(file), read_rows(file)
    assert (checked.mended, checked.damaged, checked.cut_off) == (read.mended, read.damaged, read.cut_off)
    if value != CONTENT[at]:
        assert json.dumps(checked.rows) == json.dumps(read.rows)
        assert checked.mended or checked.damaged or checked.cut_off
    else:
        assert not checked.rows, "a whole file is not decoded"


def test_the_id_of_a_record_is_that_of_its_trajectory() -> None:
    for name in ("a.train-g0-m0", "b" * 300, "ä\N{SNOWMAN}"):
        assert Trajectory.read_rollout_id(Trajectory(name, "at", "g", "Lake", 1).to_bytes()) == name


async def test_ids_are_those_of_ended_and_of_open_rollouts() -> None:
    store = MemoryStore()
    for number in range(6):
        await store.enqueue_rollout({"number": number}, rollout_id=f"run.train-g{number}-m0", mode="train")
    await store.enqueue_rollout({}, rollout_id="other.train-g0-m0", mode="train")
    ended = await store.start_attempt("run.train-g1-m0", "worker")
    await store.update_attempt(ended.rollout_id, ended.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
    await store.start_attempt("run.train-g2-m0", "worker")
    await store.cancel_rollouts(["run.train-g3-m0"], "not needed")
    found = await rollout_ids(store, "run.train-g", "train")
    assert sorted(found) == [f"run.train-g{number}-m0" for number in range(6)]
    assert len(found) == len(set(found))
    await store.close()


class CountingStore(MemoryStore):
    """Notes from where its completion log is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_from: list[int] = []

    async def read_completions(self, after: int = 0, **more: Any) -> list[CompletionEntry]:
        self.read_from.append(after)
        return await super().read_completions(after, **more)


async def test_the_completion_log_is_read_once() -> None:
    store, log = CountingStore(), CompletionsRead()
    names = [f"run.train-g{number}-m0" for number in range(4)]
    for name in names:
        await store.enqueue_rollout({}, rollout_id=name, mode="train")
    await store.cancel_rollouts(names[:2], "not needed")
    assert [each.rollout_id for each in await log.read_on(store)] == names[:2]
    await store.cancel_rollouts(names[2:3], "not needed")
    assert [each.rollout_id for each in await log.read_on(store)] == names[:3]
    assert sorted(await rollout_ids(store, "run.train-g", "train", log)) == names
    assert store.read_from.count(0) == 1
    await store.close()


async def test_rollouts_that_were_open_when_the_store_was_checked_are_not_asked_for_again() -> None:
    store, log = MemoryStore(), CompletionsRead()
    log.open_ids = ["run.train-g7-m0", "other.train-g1-m0"]
    assert await rollout_ids(store, "run.train-g", "train", log) == ["run.train-g7-m0"]
    await store.close()
