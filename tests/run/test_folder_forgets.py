"""A run's folder without what is forgotten: every file, whatever is written to it meanwhile, and who may write."""

import json
from pathlib import Path

import pytest

from rollwright.config import build
from rollwright.errors import RollwrightError
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.retention import Forgotten, Position, write_forgotten
from rollwright.trajectory import Trajectory

FORGOTTEN = Forgotten("lake", Position(1, 2, "ab"), floor=2, foreign=frozenset({"swarm-a-b"}))
RECORDED = [["lake.train-g0", "lake.train-g1", "swarm-a-b"], ["lake.train-g2", "swarm-a-c"]]


def add(folder: RunFolder, group_id: str) -> None:
    trajectory = Trajectory(f"{group_id}-m0", "1", group_id, "FrozenLake", 0)
    folder.add_trajectory(trajectory.rollout_id, trajectory.to_bytes())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Two steps, of which the first is to be forgotten; a failure in each; a validation before each."""
    made = RunFolder.begin(tmp_path / "lake", build({"name": "lake"}))
    for step, groups in enumerate(RECORDED):
        add(made, f"lake.val{step}-g0")
        made.add_metrics({"mode": "val", "step": step, "groups": [f"lake.val{step}-g0"]})
        for group in groups:
            add(made, group)
        made.add_failure(f"lake.train-g{2 * step}-m1", "engine: gone")
        made.add_metrics({"mode": "train", "step": step, "groups": groups})
    add(made, "swarm-a-d")  # was taken, and came into no batch
    return made


def found(path: Path) -> tuple[list[str], list[tuple[str, int]], list[str]]:
    reader = RunReader(path)
    log = [each.group_id for each in reader.trajectories()]
    assert not reader.cut_off
    rows = [(row["mode"], row["step"]) for row in reader.metrics()]
    return log, rows, [row["rollout_id"] for row in reader.failures()]


KEPT = (
    ["lake.val1-g0", "lake.train-g2", "swarm-a-c"],
    [("val", 1), ("train", 1)],
    ["lake.train-g2-m1"],
)


def test_readers_leave_out_what_is_forgotten_before_it_is_removed(folder: RunFolder) -> None:
    write_forgotten(folder.path, FORGOTTEN)
    folder.trajectories()  # what was added is in the file
    log, rows, failures = found(folder.path)
    assert (log, rows, failures) == ([*KEPT[0], "swarm-a-d"], KEPT[1], KEPT[2])
    assert RunReader(folder.path).shown_steps() == ("steps 1…1; earlier ones were removed (keep_steps)")


def test_what_is_added_while_the_rest_is_copied_is_kept(folder: RunFolder) -> None:
    write_forgotten(folder.path, FORGOTTEN)
    kept = folder.copy_kept(FORGOTTEN)
    add(folder, "lake.train-g3")
    folder.add_failure("lake.train-g3-m1", "engine: gone")
    folder.remove(kept)
    add(folder, "lake.train-g4")
    add(folder, "lake.train-g3")  # told of again
    folder.trajectories()
    (folder.path / "forgotten.json").unlink()  # what is written, not what readers make of it
    log, rows, failures = found(folder.path)
    assert log == [*KEPT[0], "lake.train-g3", "lake.train-g4"]
    assert rows == KEPT[1]
    assert failures == [*KEPT[2], "lake.train-g3-m1"]
    assert folder.log.rollouts == [f"{group}-m0" for group in log]
    assert set(folder.log.read(folder.log.rollouts)) == set(folder.log.rollouts)
    assert not list(folder.path.glob("*.partial"))


def test_the_new_log_is_locked_as_the_old_one_was(folder: RunFolder) -> None:
    write_forgotten(folder.path, FORGOTTEN)
    folder.remove(folder.copy_kept(FORGOTTEN))
    with pytest.raises(RollwrightError, match="another process is writing to this run"):
        RunFolder.reopen(folder.path)
    folder.finish({"interrupted": False, "error": None})
    RunFolder.reopen(folder.path).log.close()


def test_whoever_goes_on_with_a_folder_removes_what_is_left_of_the_forgotten(folder: RunFolder) -> None:
    write_forgotten(folder.path, FORGOTTEN)
    (folder.path / "trajectories.rwlog.partial").write_bytes(b"half")
    folder.finish({})
    again = RunFolder.reopen(folder.path)
    again.trajectories()
    (folder.path / "forgotten.json").unlink()
    assert found(folder.path) == KEPT
    lines = (folder.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 1]
    again.log.close()
