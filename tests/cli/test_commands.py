"""The command line as a user types it: real processes, real files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFIG = """
max_steps: 2
rollout_batch_size: 16
train_env_manager:
  num_env_groups: 4
  group_size: 4
  tags: [FrozenLake, SimpleSokoban]
val_env_manager:
  num_env_groups: 6
  tags: [FrozenLake, SimpleSokoban]
policy: {kind: oracle}
"""


def rollwright(*words: str | Path, cwd: Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollwright", *map(str, words)]
    return subprocess.run(command, cwd=cwd, input=typed, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run of the oracle, under `runs/lake`."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "lake.yaml").write_text(CONFIG, encoding="utf-8")
    done = rollwright("run", "lake.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "results: runs/lake" in done.stdout
    return folder


def test_a_run_leaves_config_trajectories_metrics_and_summary_in_one_folder(played: Path) -> None:
    run = played / "runs" / "lake"
    assert {file.name for file in run.iterdir()} >= {
        "config.yaml",
        "trajectories.rwlog",
        "metrics.jsonl",
        "summary.json",
    }
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ledger"]["opened"] == summary["ledger"]["delivered"] == 2 * 16 + 6
    assert [row["success"] for row in summary["results"]] == [1.0] * 4
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["mode"], row["trajectories"]) for row in rows] == [("train", 16), ("train", 16), ("val", 6)]


def test_random_and_oracle_success_stand_beside_every_result(played: Path) -> None:
    summary = json.loads((played / "runs" / "lake" / "summary.json").read_text())
    for row in summary["results"]:
        assert row["oracle_success"] == 1.0
        assert 0.0 <= row["random_success"] < 0.9
    shown = rollwright("show", "runs/lake", cwd=played).stdout
    assert "random" in shown
    assert "oracle" in shown


def test_the_configuration_as_used_runs_again_to_the_same_results(played: Path) -> None:
    again = rollwright("run", "runs/lake/config.yaml", "name=again", cwd=played)
    assert again.returncode == 0, again.stderr
    first, second = (
        json.loads((played / "runs" / name / "summary.json").read_text()) for name in ("lake", "again")
    )
    assert first["results"] == second["results"]


def test_a_second_run_of_the_same_name_overwrites_nothing(played: Path) -> None:
    before = (played / "runs" / "lake" / "summary.json").read_bytes()
    again = rollwright("run", "lake.yaml", "max_steps=1", cwd=played)
    assert "results: runs/lake-2" in again.stdout
    assert (played / "runs" / "lake" / "summary.json").read_bytes() == before


def test_show_prints_a_trajectory_with_the_reward_of_each_turn(played: Path) -> None:
    shown = rollwright("show", "runs/lake", "train-g0-m1", cwd=played)
    assert shown.returncode == 0, shown.stderr
    assert "lake.train-g0-m1" in shown.stdout
    assert "FrozenLake" in shown.stdout
    assert "turn 1" in shown.stdout
    assert "reward +1" in shown.stdout
    assert "<answer>" in shown.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "runs/lake", "g99-m0"), "g99-m0: runs/lake has no such rollout"),
        (("show", "runs/lake", "m0"), "rollouts of runs/lake end with it"),
        (("show", "runs/nothing"), "runs/nothing: there is no such file or folder"),
        (("show", "nothing.db"), "nothing.db: there is no such"),
        (("show", "."), ".: is not a run folder"),
        (("run", "nothing.yaml"), "nothing.yaml: cannot be read"),
        (("run", "lake.yaml", "train_env_manager.group_sise=2"), "did you mean `group_size`?"),
        (
            ("run", "lake.yaml", "train_env_manager.tags=[FrozenLak]"),
            "train_env_manager.tags: unknown environment",
        ),
        (("run", "lake.yaml", "custom_envs.FrozenLake.env_config.sise=3"), "size"),
        (("run", "lake.yaml", "custom_envs.FrozenLake.agent_template=see {obs}"), "known placeholders"),
        (("play", "Frozen"), "FrozenLake"),
        (("export", "runs/lake", "--to", "csv"), "unknown format; known: parquet"),
        (("export", "runs/lake", "--output", "nowhere/x.parquet"), "nowhere/x.parquet"),
        (("run", "lake.yaml", "name=a[/b]"), "name: got 'a[/b]'"),
        (("run", "lake[/x].yaml"), "lake[/x].yaml: cannot be read"),
        (("run", "lake.yaml", "async_generation_ratio=.inf"), "async_generation_ratio: got inf"),
        (("run", "lake.yaml", "--runs", "lake.yaml"), "lake.yaml"),
        (
            ("run", "lake.yaml", "train_env_manager.group_filter=bogus"),
            "unknown `bogus`; known: zero_variance",
        ),
        (("ps", "--store", "typo.db"), "there is no such file"),
        (("worker", "--store", "typo.db"), "there is no such file"),
    ],
)
def test_a_users_mistake_is_one_line_without_a_traceback(
    played: Path, words: tuple[str, ...], says: str
) -> None:
    failed = rollwright(*words, cwd=played)
    assert failed.returncode == 2
    assert says in failed.stderr
    assert failed.stderr.startswith("error: ")
    assert failed.stderr.count("\n") == 1
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    "mistake", ["train_env_manager.tags=[Nowhere,FrozenLake]", "train_env_manager.group_filter=bogus"]
)
def test_a_mistake_leaves_no_run_folder_behind(played: Path, mistake: str) -> None:
    rollwright("run", "lake.yaml", "name=wrong", mistake, cwd=played)
    assert not (played / "runs" / "wrong").exists()


def test_a_run_that_has_ended_is_not_gone_on_with_and_stays_as_it_is(played: Path) -> None:
    run = played / "runs" / "lake"
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    said = rollwright("resume", "runs/lake", cwd=played)
    assert said.returncode == 0, said.stderr
    assert "has ended" in said.stdout
    assert {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()} == before


def test_two_processes_do_not_write_to_one_run(played: Path, tmp_path: Path) -> None:
    from rollwright.run.folder import RunFolder

    unfinished = tmp_path / "lake"
    shutil.copytree(played / "runs" / "lake", unfinished)
    (unfinished / "summary.json").unlink()
    holding = RunFolder.reopen(unfinished)
    refused = rollwright("resume", str(unfinished), cwd=played)
    assert refused.returncode == 2
    assert "another process is writing to this run" in refused.stderr
    holding.log.close()


def test_a_run_remembers_its_store_without_the_password(tmp_path: Path) -> None:
    from rollwright.config import build
    from rollwright.run.folder import RunFolder

    config = build({"train_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]}})
    folder, _ = RunFolder.create(tmp_path, config)
    assert folder.store_address(None) == str(folder.path / "store.db")
    assert folder.store_address("postgresql://me:secret@host/db") == "postgresql://me:secret@host/db"
    assert folder.store_address(None) == "postgresql://me@host/db"


def test_ones_own_environment_in_the_current_folder_is_found(played: Path) -> None:
    (played / "corridor.py").write_text(
        "from rollwright.envs.games.frozen_lake import FrozenLake\n\n\ndef make():\n    return FrozenLake(size=4)\n"
    )
    done = rollwright(
        "run",
        "lake.yaml",
        "name=own",
        "max_steps=1",
        "val_env_manager=null",
        "train_env_manager.tags=[Corridor]",
        "custom_envs.Corridor.env_type=corridor:make",
        cwd=played,
    )
    assert done.returncode == 0, done.stderr
    assert "Corridor" in done.stdout


def test_export_keeps_ids_and_links(played: Path) -> None:
    import pyarrow.parquet as pq

    from rollwright.run.folder import RunReader

    done = rollwright("export", "runs/lake", "--to", "parquet", cwd=played)
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(played / "runs" / "lake" / "trajectories.parquet").to_pylist()
    turns = [turn for each in RunReader(played / "runs" / "lake").trajectories() for turn in each.turns]
    assert [row["sampled_ids"] for row in rows] == [turn.sampled_ids.tolist() for turn in turns]
    assert [row["extends"] for row in rows] == [turn.extends for turn in turns]


def test_envs_lists_the_four_tags_and_the_families_B8(tmp_path: Path) -> None:
    shown = rollwright("envs", cwd=tmp_path).stdout
    for tag in (
        "FrozenLake",
        "SimpleSokoban",
        "LargerSokoban",
        "SokobanDifferentGridVocab",
        "gymnasium:",
        "reasoning_gym:",
    ):
        assert tag in shown


def test_a_person_can_play_with_names_numbers_and_the_oracles_help(tmp_path: Path) -> None:
    shown = rollwright("play", "FrozenLake", "--seed", "3", cwd=tmp_path, typed="?\nnonsense\n1\n\n")
    assert shown.returncode == 0, shown.stderr
    assert "the oracle would play" in shown.stdout
    assert "format penalty -0.01" in shown.stdout


def test_ctrl_c_ends_cleanly_and_keeps_what_is_done(tmp_path: Path) -> None:
    """Interrupted in the middle: exit code 130, a summary, and every finished trajectory readable."""
    from rollwright.run.folder import RunReader

    (tmp_path / "slow.yaml").write_text(CONFIG.replace("max_steps: 2", "max_steps: 1000"), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "rollwright",
        "run",
        "slow.yaml",
        "policy.kind=simulated",
        "policy.slots=4",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs" / "slow" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and metrics.read_text().count("\n") >= 1:
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in output
    assert "Traceback" not in errors
    reader = RunReader(tmp_path / "runs" / "slow")
    summary = reader.summary()
    assert summary is not None
    assert summary["interrupted"] is True
    ledger = summary["ledger"]
    assert ledger["opened"] == sum(count for place, count in ledger.items() if place != "opened")
    assert len(list(reader.trajectories())) >= 16
    assert not reader.cut_off


def test_a_log_cut_off_at_any_byte_gives_back_every_whole_record(played: Path, tmp_path: Path) -> None:
    import shutil

    from rollwright.run.folder import RunReader

    whole = played / "runs" / "lake"
    ids = [each.rollout_id for each in RunReader(whole).trajectories()]
    log = (whole / "trajectories.rwlog").read_bytes()
    for cut in range(len(log) - 400, len(log), 7):
        copy = tmp_path / f"cut{cut}"
        shutil.copytree(whole, copy)
        (copy / "trajectories.rwlog").write_bytes(log[:cut])
        reader = RunReader(copy)
        left = [each.rollout_id for each in reader.trajectories()]
        assert left == ids[: len(left)]
        assert len(left) < len(ids)
