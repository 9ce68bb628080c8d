"""Whatever happens to a file of a run, the next command says so or repairs it; what is still anywhere is not lost.

`ROLLWRIGHT_DAMAGES` makes it as many damages as one likes, `ROLLWRIGHT_DAMAGE_SEED` others than before.
"""

import os
import random
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
import yaml
from damaging import (
    CONFIG,
    STEPS,
    Said,
    copied,
    damage,
    ended_run,
    files_of,
    killed_run,
    played,
    rollwright,
    settled_run,
)

from rollwright.run.folder import RunFolder, RunReader

COUNT = int(os.environ.get("ROLLWRIGHT_DAMAGES", "16"))
FIRST_SEED = int(os.environ.get("ROLLWRIGHT_DAMAGE_SEED", "0"))

TOLD_OF = ("trajectories.rwlog", "metrics.jsonl", "summary.json")
"""Files in which any damage is found, because checksums cover all of them. SQLite has none, and a setting that is
another valid one may be meant."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Killed, with a write-ahead log; the same without one; and ended."""
    place = tmp_path_factory.mktemp("runs")
    killed = killed_run(place)
    for name in ("settled", "ended"):
        (place / name).mkdir()
    return {
        "killed": killed,
        "settled": settled_run(place / "settled", killed),
        "ended": ended_run(place / "ended", killed),
    }


def check(said: Said) -> Said:
    assert said.code in (0, 2), said
    if said.code:
        assert len(said.err.strip().splitlines()) == 1, said
        assert said.err.startswith("error: "), said
    return said


def check_whole(run: Path) -> None:
    """As if nothing had been the matter: every batch once, every rollout once."""
    reader = RunReader(run)
    rows = reader.metrics()
    assert sorted(row["step"] for row in rows if row["mode"] == "train") == list(range(STEPS))
    groups = Counter(group for row in rows for group in row["groups"])
    assert set(groups.values()) == {1}
    rollouts = Counter(each.rollout_id for each in reader.trajectories())
    assert set(rollouts.values()) == {1}
    assert reader.problems == []
    assert groups.keys() <= {each.rpartition("-m")[0] for each in rollouts}


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + COUNT))
def test_a_damaged_file_is_told_of_or_repaired_and_costs_nothing_that_is_left(
    runs: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    draw = random.Random(f"damage {seed}")
    kind = draw.choice(sorted(runs))
    run = copied(runs[kind], tmp_path)
    before = played(run)
    file = draw.choice(files_of(run))
    what = damage(file, draw)
    log = run / "trajectories.rwlog"
    left = log.read_bytes() if log.exists() else b""
    intact = {rollout_id: data for rollout_id, data in before.items() if data in left}
    parquet = str(tmp_path / "all.parquet")
    looked = [
        check(rollwright("show", str(run))),
        check(rollwright("export", str(run), "--output", parquet)),
        check(rollwright("profile", str(run), "--timeline", str(tmp_path / "timeline.json"))),
        check(rollwright("report", str(run))),
    ]
    went_on = check(rollwright("resume", str(run), "--no-live"))
    said = " ".join(each.all for each in (*looked, went_on))
    if file.name in TOLD_OF and not (what.startswith("removed") and file.name != "trajectories.rwlog"):
        assert file.name in said or "the last record of the trajectory log is incomplete" in said, (
            what,
            said,
        )
    if not (run / "config.yaml").exists():
        assert "config.yaml: is missing" in said, what
        return
    after = played(run) if log.exists() else {}
    assert {each: after.get(each) for each in intact} == intact, what
    if went_on.code == 0:
        check_whole(run)
        assert check(rollwright("show", str(run))).code == 0, what
    else:
        assert file.name in said or "lost" in went_on.err, (what, went_on)


def test_a_byte_that_is_wrong_in_the_log_costs_nothing_and_is_said_once(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = copied(runs["ended"], tmp_path)
    before = played(run)
    log = run / "trajectories.rwlog"
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0x40
    log.write_bytes(bytes(content))
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 0
    assert said.out.count("trajectories.rwlog: 1 record had a wrong byte") == 1
    assert played(run) == before
    again = rollwright("resume", str(run), "--no-live")
    assert "wrong byte" not in again.all
    assert RunReader(run).problems == []


def test_damaged_records_are_read_again_from_a_store_that_still_has_them(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """As in a folder of a release that kept both."""
    run = copied(runs["settled"], tmp_path)
    before = played(run)
    log = run / "trajectories.rwlog"
    content = bytearray(log.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 6000] = random.Random(1).randbytes(6000)
    log.write_bytes(bytes(content))
    lost = len(before) - sum(data in bytes(content) for data in before.values())
    assert lost >= 2
    shown = rollwright("show", str(run))
    assert shown.code == 2
    assert "1 damaged place" in shown.err
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 0, said
    assert "1 damaged place" in said.all
    assert "read again from the store" in said.all
    after = played(run)
    assert {each: after[each] for each in before} == before
    assert content[middle : middle + 6000] in (run / "trajectories.rwlog.damaged").read_bytes()
    check_whole(run)


def test_what_nobody_has_any_more_is_named_and_the_run_is_finished(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = copied(runs["settled"], tmp_path)
    before = list(played(run))
    with sqlite3.connect(run / "store.db") as store:
        named = ", ".join(f"'{each}'" for each in before)
        store.execute(
            f"DELETE FROM trajectories WHERE place IN (SELECT place FROM rollouts WHERE rollout_id IN ({named}))"
        )
    log = run / "trajectories.rwlog"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    gone = len(before) - len(played(run))
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 2
    assert f"finished trajectories that were lost: {gone}" in said.err
    assert f"has them: {gone} (" in said.all
    rows = [row for row in RunReader(run).metrics() if row["mode"] == "train"]
    assert [row["step"] for row in rows] == list(range(STEPS))
    summary = RunReader(run).summary()
    assert summary is not None
    assert summary["lost"] == gone
    assert summary["error"] is None


@pytest.mark.parametrize("gone", [["store.db", "store.db-wal", "store.db-shm"], ["store.db-wal"]])
def test_without_its_store_a_run_says_so_and_plays_nothing_finished_again(
    runs: dict[str, Path], tmp_path: Path, gone: list[str]
) -> None:
    run = copied(runs["killed"], tmp_path)
    before = played(run)
    for name in gone:
        (run / name).unlink()
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 0, said
    assert ("the store is missing" if "store.db" in gone else "does not know that") in said.all
    after = played(run)
    assert {each: after[each] for each in before} == before
    check_whole(run)
    assert "does not know" not in rollwright("resume", str(run), "--no-live").out


def test_a_damaged_store_is_kept_aside_and_what_only_it_has_is_saved(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = copied(runs["settled"], tmp_path)
    store, log = run / "store.db", run / "trajectories.rwlog"
    before = played(run)
    recorded = {group for row in RunReader(run).metrics() for group in row["groups"]}
    content = store.read_bytes()
    store.write_bytes(content.replace(b"CREATE TABLE completions", b"DAMAGED TABLE completion"))
    log.write_bytes(b"")
    said = rollwright("resume", str(run), "--no-live")
    assert "kept aside as store.db.damaged and replaced by a new one" in said.all
    assert (run / "store.db.damaged").is_file()
    after = played(run)
    saved = {each for each in before if each.rpartition("-m")[0] not in recorded}
    assert {each: after[each] for each in saved} == {each: before[each] for each in saved}


def test_garbage_in_metrics_or_failures_names_the_file_and_the_line_and_the_batch_is_handed_out_again(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = copied(runs["ended"], tmp_path)
    before = played(run)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0] + b"!" * 40 + b"\n" + b"".join(lines[2:]))
    (run / "failures.jsonl").write_bytes(b"\xff\xfe\n")
    shown = rollwright("show", str(run))
    assert shown.code == 2
    assert "metrics.jsonl: line 2 cannot be read" in shown.err
    assert "failures.jsonl: line 1 cannot be read" in shown.err
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 0, said
    assert "metrics.jsonl: line 2 cannot be read" in said.all
    assert (run / "metrics.jsonl.damaged").read_bytes() == b"!" * 40 + b"\n"
    after = played(run)
    assert {each: after[each] for each in before} == before
    check_whole(run)


def test_a_folder_of_an_older_release_is_gone_on_with(runs: dict[str, Path], tmp_path: Path) -> None:
    """Its rows have no checksums, and its store has a copy of everything that its log has."""
    run = copied(runs["settled"], tmp_path)
    for name in ("metrics.jsonl", "failures.jsonl"):
        if (file := run / name).exists():
            rows = [line.rpartition(b', "crc"')[0] + b"}\n" for line in file.read_bytes().splitlines()]
            file.write_bytes(b"".join(rows))
    before = played(run)
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 0, said
    assert RunReader(run).problems == []
    after = played(run)
    assert {each: after[each] for each in before} == before
    assert all(b'"crc": "' in line for line in (run / "metrics.jsonl").read_bytes().splitlines())
    check_whole(run)


def test_a_lost_configuration_is_taken_from_the_store(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copied(runs["killed"], tmp_path)
    settings = RunReader(run).config
    (run / "config.yaml").unlink()
    shown = rollwright("show", str(run))
    assert shown.code == 2
    assert "config.yaml: is missing" in shown.err
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 0, said
    assert "config.yaml: is missing; restored from the run's store" in said.all
    assert RunReader(run).config == settings
    check_whole(run)


def test_each_finished_trajectory_is_on_disk_once(runs: dict[str, Path]) -> None:
    run = runs["ended"]
    with sqlite3.connect(run / "store.db") as store:
        kept = store.execute(
            "SELECT rollout_id FROM rollouts JOIN trajectories USING (place) WHERE status = 'succeeded'"
        ).fetchall()
    assert played(run)
    assert not {rollout_id for (rollout_id,) in kept} & played(run).keys()


def test_a_run_that_only_plays_forgets_its_older_batches_and_counts_them_on(tmp_path: Path) -> None:
    file = tmp_path / "lake.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "max_steps": 9, "keep_steps": 1, "eval_steps": 3}))
    said = rollwright("run", str(file), "--runs", str(tmp_path), "--no-live")
    assert said.code == 0, said
    run = tmp_path / "lake"
    assert "earlier ones were removed (keep_steps)" in said.all
    reader = RunReader(run)
    steps = [row["step"] for row in reader.metrics() if row["mode"] == "train"]
    assert steps == list(range(9))[-len(steps) :]
    assert 1 <= len(steps) <= 2
    assert not any(reader.forgotten().has_rollout(each) for each in played(run))
    summary = reader.summary()
    assert summary is not None
    ledger = summary["ledger"]
    assert ledger["opened"] == sum(count for place, count in ledger.items() if place != "opened")
    group_size = CONFIG["train_env_manager"]["group_size"]
    assert ledger["delivered"] >= 9 * CONFIG["rollout_batch_size"] >= 9 * group_size
    with sqlite3.connect(run / "store.db") as store:
        [rollouts] = store.execute("SELECT count(*) FROM rollouts").fetchone()
    assert rollouts < ledger["opened"] / 2
    assert rollwright("show", str(run)).code == 0


def test_a_run_that_forgets_is_killed_and_goes_on(tmp_path: Path) -> None:
    run = killed_run(tmp_path, max_steps=9, keep_steps=1, eval_steps=3)
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 0, said
    reader = RunReader(run)
    steps = [row["step"] for row in reader.metrics() if row["mode"] == "train"]
    assert steps == list(range(9))[-len(steps) :]
    assert 1 <= len(steps) <= 2
    summary = reader.summary()
    assert summary is not None
    ledger = summary["ledger"]
    assert ledger["opened"] == sum(count for place, count in ledger.items() if place != "opened")
    assert ledger["running"] == 0
    assert ledger["delivered"] >= 9 * CONFIG["rollout_batch_size"]


def test_a_run_that_trains_is_told_where_its_setting_is(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(
        "keep_steps: 3\ntraining: {}\ntrain_env_manager: {num_env_groups: 1, tags: [FrozenLake]}\n"
    )
    said = rollwright("run", str(file), "--runs", str(tmp_path))
    assert said.code == 2
    assert "training.keep_steps" in said.err


def test_two_do_not_repair_one_folder(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copied(runs["killed"], tmp_path)
    (run / "trajectories.rwlog").write_bytes(b"x" + (run / "trajectories.rwlog").read_bytes()[1:])
    holding = RunFolder.reopen(run)
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 2
    assert "another process is writing to this run" in said.err
    holding.log.close()
