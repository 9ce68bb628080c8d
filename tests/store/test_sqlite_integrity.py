"""`check_integrity`: a sound file passes, whatever state it was left in; a damaged one is named with its problems."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from rollwright import rng
from rollwright.store.opening import open_store
from rollwright.store.records import EnqueueRequest
from rollwright.store.sql.sqlite_integrity import check_integrity


async def filled(path: Path, count: int = 300) -> Path:
    store = await open_store(str(path))
    await store.enqueue_many_rollouts([EnqueueRequest({"n": n}, f"ro-{n}") for n in range(count)])
    await store.close()
    return path


@pytest.mark.parametrize("full", [True, False], ids=["full", "quick"])
async def test_a_sound_file_passes_while_it_is_open_after_a_crash_and_closed(
    tmp_path: Path, full: bool
) -> None:
    path, crashed = tmp_path / "store.db", tmp_path / "crashed"
    store = await open_store(str(path))
    await store.enqueue_many_rollouts([EnqueueRequest(n) for n in range(300)])
    assert check_integrity(path, full=full) == []
    crashed.mkdir()
    for name in ("store.db", "store.db-wal"):
        shutil.copy(tmp_path / name, crashed / name)
    log = (crashed / "store.db-wal").read_bytes()
    assert check_integrity(crashed / "store.db", full=full) == []
    assert (crashed / "store.db-wal").read_bytes() == log, "checking repairs nothing"
    await store.close()
    assert check_integrity(path, full=full) == []
    again = await open_store(str(path))
    assert len(await again.query_rollouts()) == 300
    await again.close()


async def test_damage_is_found_and_told_in_lines_that_name_the_file(tmp_path: Path) -> None:
    good = (await filled(tmp_path / "store.db")).read_bytes()
    damaged, missed = tmp_path / "damaged.db", 0
    for case in range(20):
        page = 4096 * (1 + int(rng.uniform("page", case) * (len(good) // 4096 - 1)))
        damaged.write_bytes(good[:page] + bytes([0xA5]) * 4096 + good[page + 4096 :])
        problems = check_integrity(damaged, full=True)
        missed += not problems
        assert all(each.startswith(f"{damaged}: ") and "\n" not in each for each in problems), problems
    assert missed <= 2, "only a page that is in no use may go unnoticed"


async def test_what_is_not_a_store_is_a_problem_too(tmp_path: Path) -> None:
    (tmp_path / "empty.db").write_bytes(b"")
    (tmp_path / "text.db").write_text("no database " * 100)
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (a)").connection.close()
    good = (await filled(tmp_path / "store.db")).read_bytes()
    (tmp_path / "cut.db").write_bytes(good[: len(good) // 2])
    for name in ("missing.db", "empty.db", "text.db", "other.db", "cut.db"):
        for full in (True, False):
            [*problems] = check_integrity(tmp_path / name, full=full)
            assert problems, name
            assert name in problems[0]
