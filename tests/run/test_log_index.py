"""The index of a trajectory log: it changes no result, and hides no damage."""

from pathlib import Path

import pytest

from rollwright.run import log_index, trajectory_log
from rollwright.run.log_records import LogCondition
from rollwright.run.trajectory_log import TRAJECTORIES, TrajectoryLog
from rollwright.trajectory import Trajectory

NAMES = [f"run.train-g{group}-m{member}" for group in range(4) for member in range(3)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_index, "PART_BYTES", 200)
    monkeypatch.setattr(trajectory_log, "FEWEST_RECORDS", 1)


def write(folder: Path, names: list[str] = NAMES, *, indexed: int = 9) -> Path:
    """A log whose first records are indexed."""
    file = folder / TRAJECTORIES
    log = TrajectoryLog.create(file)
    for number, name in enumerate(names, 1):
        log.append(name, Trajectory(name, "a", name.rpartition("-m")[0], "Lake", number).to_bytes())
        if number == indexed:
            log.index()
    log.close()
    return file


def opened(file: Path) -> tuple[dict[str, bytes], LogCondition]:
    log, condition = TrajectoryLog.reopen(file)
    found = log.read(log.rollouts)
    log.close()
    return found, condition


def index_of(file: Path) -> Path:
    return file.with_name(file.name + log_index.INDEX_SUFFIX)


def test_only_records_behind_the_index_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path)
    decoded: list[str] = []
    real = trajectory_log.rollout_of

    def counting(encoded: bytes, of: Path) -> str:
        decoded.append(real(encoded, of))
        return decoded[-1]

    monkeypatch.setattr(trajectory_log, "rollout_of", counting)
    found, condition = opened(file)
    assert decoded == NAMES[9:]
    assert list(found) == NAMES
    assert condition.whole
    assert condition.end == file.stat().st_size


def test_every_damaged_byte_of_the_log_is_found_as_without_an_index(tmp_path: Path) -> None:
    file = write(tmp_path)
    whole, index = file.read_bytes(), index_of(file).read_bytes()
    for place in range(len(whole)):
        damaged = whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :]
        results = []
        for beside in (index, None):
            file.write_bytes(damaged)
            index_of(file).unlink(missing_ok=True)
            if beside is not None:
                index_of(file).write_bytes(beside)
            found, condition = opened(file)
            results.append((found, list(condition.told(file)), file.read_bytes()))
        assert results[0] == results[1], place


def test_a_damaged_index_changes_nothing_and_is_made_again(tmp_path: Path) -> None:
    file = write(tmp_path)
    index, (right, _) = index_of(file).read_bytes(), opened(file)
    for place in range(len(index)):
        index_of(file).write_bytes(index[:place] + bytes([index[place] ^ 1]) + index[place + 1 :])
        log, condition = TrajectoryLog.reopen(file)
        assert log.read(log.rollouts) == right, place
        assert condition.whole
        log.index()
        assert log.indexed.records == len(NAMES)
        log.close()
        again, _ = TrajectoryLog.reopen(file)
        assert again.indexed.records == len(NAMES)
        again.close()


@pytest.mark.parametrize("size", [0, 3, 8, 40])
def test_a_truncated_index_changes_nothing(tmp_path: Path, size: int) -> None:
    file = write(tmp_path)
    index_of(file).write_bytes(index_of(file).read_bytes()[:size])
    found, condition = opened(file)
    assert list(found) == NAMES
    assert condition.whole


def test_the_index_of_another_log_is_ignored(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    file = write(tmp_path / "one")
    other = write(tmp_path / "other", [each.replace("train", "other") for each in NAMES])
    index_of(file).write_bytes(index_of(other).read_bytes())
    found, condition = opened(file)
    assert list(found) == NAMES
    assert condition.whole


def test_a_log_that_is_shorter_than_its_index_is_read_record_by_record(tmp_path: Path) -> None:
    file = write(tmp_path, indexed=len(NAMES))
    file.write_bytes(file.read_bytes()[:-5])  # as after a power cut
    found, condition = opened(file)
    assert list(found) == NAMES[:-1]
    assert condition.cut_off


def test_a_log_without_some_rollouts_has_no_stale_index(tmp_path: Path) -> None:
    file = write(tmp_path)
    log, _ = TrajectoryLog.reopen(file)
    log.become(log.copy_without(lambda each: "-g1-" in each))
    log.index()
    log.close()
    found, condition = opened(file)
    assert list(found) == [each for each in NAMES if "-g1-" not in each]
    assert condition.whole
