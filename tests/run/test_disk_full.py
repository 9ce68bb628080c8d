"""A disk that is full ends a run with one line that names a file; nothing is lost, and the run is gone on with."""

import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from rollwright.errors import RollwrightError
from rollwright.run.folder import RunReader

SECONDS = 120
STEPS, BATCH = 4, 256


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "lake.yaml"
    content = {
        "name": "lake",
        "max_steps": STEPS,
        "rollout_batch_size": BATCH,
        "async_generation_ratio": 1,
        "policy": {"kind": "oracle"},
        "train_env_manager": {"num_env_groups": 64, "group_size": 8, "tags": ["FrozenLake"]},
    }
    file.write_text(yaml.safe_dump(content))
    return file


def rollwright(
    *words: str | Path, before: Callable[[], None] | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rollwright", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, preexec_fn=before, check=False
    )


def said_in_one_line(ended: "subprocess.CompletedProcess[str]", run: Path) -> str:
    assert ended.returncode == 2, ended
    [line] = ended.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert str(run) in line.replace(" cannot", "")
    return line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Gives a disk of a size, and makes it larger when asked again."""
    place = tmp_path / "disk"
    place.mkdir()

    def of_size(size: str) -> Path:
        options = f"{'remount,' if place.is_mount() else ''}size={size}"
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True)
        if made.returncode:
            pytest.skip(f"no disk of its own can be mounted here: {made.stderr.decode().strip()}")
        return place

    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    yield of_size
    if place.is_mount():
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("size", ["2m", "14m"])
def test_a_full_disk_names_a_file_and_the_run_is_finished_when_there_is_room(
    config: Path, small_disk: Callable[[str], Path], size: str
) -> None:
    disk = small_disk(size)
    run = disk / "lake"
    line = said_in_one_line(rollwright("run", config, "--runs", disk, "--no-live"), run)
    assert any(name in line for name in ("store.db", "trajectories.rwlog", "metrics.jsonl")), line
    finished = Counter(each.rollout_id for each in RunReader(run).trajectories())
    said_in_one_line(rollwright("resume", run, "--no-live"), run)  # there is no more room than before
    small_disk("64m")
    went_on = rollwright("resume", run, "--no-live")
    assert went_on.returncode == 0, went_on
    reader = RunReader(run)
    rollouts = Counter(each.rollout_id for each in reader.trajectories())
    assert set(rollouts.values()) == {1}
    assert finished.keys() <= rollouts.keys()
    assert reader.problems == []
    assert [row["trajectories"] for row in reader.metrics()] == [BATCH] * STEPS


def test_a_limit_on_the_size_of_files_names_the_file_too(config: Path, tmp_path: Path) -> None:
    """For whoever is not root."""
    limit = 6 * 2**20  # less than a store's write-ahead log has from the beginning

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    line = said_in_one_line(
        rollwright("run", config, "--runs", tmp_path, "--no-live", before=limited), tmp_path / "lake"
    )
    assert "store.db" in line
    assert rollwright("resume", tmp_path / "lake", "--no-live").returncode == 0


def test_a_checkpoint_that_finds_no_room_names_its_file(small_disk: Callable[[str], Path]) -> None:
    torch = pytest.importorskip("torch")
    from rollwright.training.checkpoints import Checkpoint, write_checkpoint

    place = small_disk("1m") / "000001"
    tensors = {"model": {"weight": torch.zeros(2**20)}}
    with pytest.raises(RollwrightError, match=r"model\.safetensors: cannot be written: .*No space left"):
        write_checkpoint(place, Checkpoint(tensors, {}, {}))
    assert not place.exists()
