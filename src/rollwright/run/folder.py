"""A run's folder: the configuration as used, every finished trajectory, metrics, failures, the summary.

Invariants:
- Written data stays readable until the run prunes it (`retention`); from then on no reader shows it, whether it is removed
  yet or not.
- The log (`trajectory_log`) is the source of truth for finished trajectories: a store releases its copy once the log has it
  on the disk.
- Damage to a file is reported by its reader, and costs only the unreadable part of that file.
- One process at a time writes.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rollwright.addresses import without_password
from rollwright.errors import FormatError, RollwrightError, naming
from rollwright.run.log_records import LogCondition, decoded, records
from rollwright.run.retention import Forgotten, read_forgotten
from rollwright.run.sealed_rows import SealedRows, check_rows, iterate_rows, read_sealed, seal
from rollwright.run.trajectory_log import TRAJECTORIES, TrajectoryLog
from rollwright.trajectory import Trajectory

if TYPE_CHECKING:
    from rollwright.config import RunConfig
from rollwright.run.rewriting import KeptLog, fold_costs, remove_rows, repair_rows

_log = logging.getLogger(__name__)

CONFIG, METRICS, FAILURES, COSTS, DRAWS, SUMMARY, STORE, ADDRESS = (
    "config.yaml",
    "metrics.jsonl",
    "failures.jsonl",
    "costs.jsonl",
    "draws.jsonl",
    "summary.json",
    "store.db",
    "store.address",
)


TREE_PREFIX = "tree_"
"""Prefix of the metrics that a tree search records in its trajectory."""

SIMULATED = "SIMULATED"
"""Part of every title of a run that the simulated engine has played: its figures say nothing about a model."""

LAST_SETTING = "custom_envs"
"""Last key of a written configuration, which has every default filled in; a file without it is truncated."""

LOST_NAMED = 5
"""Lost rollouts that a message names."""


class RunFolder:
    """A run's folder, open for writing."""

    def __init__(self, path: Path, log: TrajectoryLog, failed: dict[str, str]) -> None:
        self.path = path
        self.log = log
        self.failed = failed
        """Reasons of the recorded failures, by rollout."""
        self.repairs: list[str] = []
        """Damage that was found, and its repair; one line each."""
        self.lost: list[str] = []
        """Finished rollouts whose trajectories are lost."""
        self.store_is_new = False
        """Whether the store was lost and replaced, which is reported already; the new one knows no finished rollout."""
        self._draws_unflushed = False
        self.on_repair: Callable[[str], None] = _log.warning
        """Called with every further line of `repairs`."""

    @classmethod
    def create(cls, runs: Path, config: "RunConfig") -> tuple["RunFolder", "RunConfig"]:
        """Create `runs/NAME`, or `runs/NAME-2` and so on if it exists: no run overwrites another.

        Also returns the configuration with the run's final name.
        """
        name, number = config.name, 2
        while (runs / name).exists():
            name = f"{config.name}-{number}"
            number += 1
        config = config.model_copy(update={"name": name})
        return cls.begin(runs / name, config), config

    @classmethod
    def begin(cls, path: Path, config: "RunConfig") -> "RunFolder":
        """Create a run in exactly this folder, which may exist but must not be a run."""
        path.mkdir(parents=True, exist_ok=True)
        if (path / CONFIG).exists():
            raise RollwrightError(f"{path}: is a run already")
        folder = cls(path, TrajectoryLog.create(path / TRAJECTORIES), {})
        folder.keep_settings(config)  # last: with it the folder is a run
        return folder

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Open the folder of an earlier process: partial records are truncated, damaged bytes are moved aside."""
        reader = RunReader(path)
        forgotten = reader.forgotten()
        file = path / TRAJECTORIES
        repairs: list[str] = []
        if file.exists():
            log, condition = TrajectoryLog.reopen(file)
            repairs += condition.told(file)
        else:
            log = TrajectoryLog.create(file)
            repairs.append(f"{file}: is missing; a new one is started")
        for name in (METRICS, FAILURES, COSTS, DRAWS):
            repairs += repair_rows(check_rows(path / name))
        folder = cls(path, log, {row["rollout_id"]: row["reason"] for row in reader.failures()})
        folder.repairs = repairs
        if forgotten.steps:  # the last process may have been killed while it removed pruned steps
            folder.remove(folder.copy_kept(forgotten))
        return folder

    def keep_settings(self, config: "RunConfig") -> None:
        """Write the settings that the run uses from now on."""
        from rollwright.config import dump

        partial = self.path / f"{CONFIG}.partial"
        with naming(partial):
            partial.write_text(dump(config), encoding="utf-8")
        partial.replace(self.path / CONFIG)

    def store_address(self, told: str | None) -> str:
        """Address of the run's store: the given one, the one that was given before, or a file in the folder.

        A given address is remembered without its password; a resumed run needs the password again, best by PGPASSWORD.
        """
        remembered = self.path / ADDRESS
        if told is not None:
            with naming(remembered):
                remembered.write_text(without_password(told) + "\n", encoding="utf-8")
            return told
        if not remembered.is_file():
            return str(self.path / STORE)
        try:
            return remembered.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise FormatError(f"{remembered}: is damaged: {error}; give --store again") from error

    def add_trajectory(self, rollout_id: str, encoded: bytes) -> None:
        """Append a trajectory; a rollout that is in the log already is ignored."""
        self.log.append(rollout_id, encoded)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield all trajectories that were added so far."""
        self.log.flush()
        return RunReader(self.path).trajectories()

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Record a delivered batch; its trajectories are flushed first."""
        self.log.flush()
        self._append(METRICS, row)
        self.log.index()

    def add_costs(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record what rollouts have used; see `costs`."""
        file = self.path / COSTS
        with naming(file), file.open("a", encoding="utf-8") as opened:
            opened.writelines(seal(row) + "\n" for row in rows)

    def add_failure(self, rollout_id: str, reason: str) -> None:
        """Record a permanent failure; a rollout that has one already is ignored."""
        if rollout_id in self.failed:
            return
        self.failed[rollout_id] = reason
        self._append(FAILURES, {"rollout_id": rollout_id, "reason": reason})

    def add_draw(self, row: Mapping[str, Any]) -> None:
        """Record what a group plays, or what it showed; see `rollout.draws`."""
        self._append(DRAWS, row)
        self._draws_unflushed = True

    def flush_draws(self) -> None:
        """Flush the recorded draws to the disk."""
        if not self._draws_unflushed:
            return
        self._draws_unflushed = False
        file = self.path / DRAWS
        with naming(file), file.open("rb") as opened:
            os.fsync(opened.fileno())

    def tell(self, line: str) -> None:
        """Report damage and its repair."""
        self.repairs.append(line)
        self.on_repair(line)

    def lose(self, rollout_ids: Sequence[str]) -> None:
        """Report finished rollouts whose trajectories are lost."""
        self.lost += rollout_ids
        some = ", ".join(rollout_ids[:LOST_NAMED]) + (" …" if len(rollout_ids) > LOST_NAMED else "")
        self.tell(
            f"{self.path}: finished trajectories that are lost, because neither {TRAJECTORIES} nor the store has them: "
            f"{len(rollout_ids):,} ({some})"
        )

    def copy_kept(self, forgotten: Forgotten) -> "KeptLog":
        """First half of pruning: copy the log without the pruned steps. Other threads may write to the folder meanwhile."""
        rows = RunReader(self.path).metrics()
        kept = KeptLog(forgotten, {group for row in rows for group in row["groups"]})
        kept.copy = self.log.copy_without(kept.leaves_out)
        return kept

    def remove(self, kept: "KeptLog") -> None:
        """Second half of pruning, which is quick: replace the log, and remove pruned lines from the other files."""
        assert kept.copy is not None
        self.log.become(kept.copy)
        self.failed = {each: why for each, why in self.failed.items() if not kept.leaves_out(each)}
        for name, is_forgotten in (
            (METRICS, kept.forgotten.has_row),
            (FAILURES, lambda row: kept.forgotten.has_rollout(row["rollout_id"])),
        ):
            remove_rows(self.path / name, is_forgotten)
        fold_costs(self.path / COSTS, kept.forgotten.has_rollout)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and close the log."""
        partial = self.path / f"{SUMMARY}.partial"
        with naming(partial):
            partial.write_text(seal(summary, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path / SUMMARY)
        self.log.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        file = self.path / name
        with naming(file), file.open("a", encoding="utf-8") as opened:
            opened.write(seal(row) + "\n")


class RunReader:
    """A run's folder, open for reading; collects the damage that it finds."""

    def __init__(self, path: Path) -> None:
        if not (path / CONFIG).is_file():
            if (path / TRAJECTORIES).is_file():
                raise RollwrightError(
                    f"{path / CONFIG}: is missing; `rollwright resume {path}` takes it from the run's store"
                )
            raise RollwrightError(f"{path}: is not a run folder; one has a {CONFIG}")
        self.path = path
        self.log_condition = LogCondition()
        """Condition of the trajectory log, as far as the last pass has read."""
        self._lost = False
        """Whether a file other than the log has unreadable parts."""
        self._told: dict[str, None] = {}
        """Damage of the other files, in the order of its discovery."""

    @property
    def cut_off(self) -> bool:
        """Whether the last record read was incomplete."""
        return self.log_condition.cut_off

    @property
    def problems(self) -> list[str]:
        """Damage in the files that were read, one line each. A partial record at the end of the log is not included: every
        killed run leaves one."""
        return [*self.log_condition.told(self.path / TRAJECTORIES), *self._told]

    @property
    def is_damaged(self) -> bool:
        """Whether written data cannot be read."""
        return bool(self.log_condition.damaged or self._lost)

    @property
    def config(self) -> "RunConfig":
        from rollwright.config import build  # reading a run's results needs no settings models

        return build(read_settings(self.path), source=str(self.path / CONFIG))

    @property
    def simulated(self) -> bool:
        """Whether the simulated engine has played the run: then its figures say nothing about a model."""
        known: bool | None = (self.summary() or {}).get("simulated")
        if known is not None:
            return known
        try:  # the run has not ended, or an older release has written it
            return self.config.plays_simulated
        except RollwrightError:
            return False  # damaged settings are reported where they are needed

    @property
    def title(self) -> str:
        """Title of plots and pages."""
        return f"{self.config.name} · {SIMULATED}" if self.simulated else self.config.name

    def summary(self) -> dict[str, Any] | None:
        """`None` if the run has not ended, or its summary is damaged."""
        file = self.path / SUMMARY
        if not file.is_file():
            return None
        try:
            summary, mended = read_sealed(file)
            if "interrupted" not in summary and "training" not in summary:
                raise FormatError(f"{file}: is damaged: the reason of the run's end is missing")
        except FormatError as error:
            self._tell(f"{error}; left out", lost=True)
            return None
        if mended:
            self._tell(f"{file}: had a wrong byte, put right by the checksum")
        return summary

    @property
    def ended(self) -> bool:
        """Whether the run has finished, neither interrupted nor by an error, so that nothing is left to resume."""
        summary = self.summary()
        if summary is None or summary.get("interrupted", True) or summary.get("error") is not None:
            return False
        config = self.config
        if config.training is None and config.train_env_manager is not None:
            there = {row["step"] for row in self.metrics() if row["mode"] == "train"}
            missing = [step for step in range(self.forgotten().steps, config.max_steps) if step not in there]
            if missing:
                self._tell(f"{self.path / METRICS}: has no line for step {_some(missing)}", lost=True)
            return not missing
        return True

    def forgotten(self) -> Forgotten:
        """Pruned steps, which are not shown."""
        return read_forgotten(self.path)

    def shown_steps(self) -> str | None:
        """A line with the steps that are left; `None` if no step is pruned."""
        if not (first := self.forgotten().steps):
            return None
        steps = [row["step"] for row in self.metrics() if row["mode"] == "train"]
        setting = "keep_steps" if self.config.training is None else "training.keep_steps"
        return f"steps {first}…{max(steps, default=first)}; earlier ones were removed ({setting})"

    def metrics(self) -> list[dict[str, Any]]:
        forgotten = self.forgotten()
        return [row for row in self._rows(METRICS, is_metrics_row) if not forgotten.has_row(row)]

    def costs(self) -> list[dict[str, Any]]:
        """What each ended rollout has used; those of pruned steps are one line for each tag, without a rollout."""
        return list(self.iterate_costs())

    def iterate_costs(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of `costs` one by one."""
        return self._iterate(COSTS, _is_costs)

    def draws(self) -> list[dict[str, Any]]:
        """What each training group was to play, and what it showed, in their order; only with a curriculum or a task sampler."""
        return self._rows(DRAWS, is_draws_row)

    def group_sizes(self) -> dict[int, int]:
        """Sizes of the training groups whose draws are recorded, by index."""
        return {row["group"]: row["members"] for row in self.draws() if "slot" in row}

    def failures(self) -> list[dict[str, Any]]:
        forgotten = self.forgotten()
        return [
            row
            for row in self._rows(FAILURES, is_failure_row)
            if not forgotten.has_rollout(row["rollout_id"])
        ]

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield all finished trajectories that are not pruned, in the order of their ends."""
        forgotten = self.forgotten()
        rows = (
            self.metrics()
        )  # read before the log, because the log has a batch's trajectories before its line is written
        groups, there = {group for row in rows for group in row["groups"]}, 0
        self.log_condition = condition = LogCondition()
        file = self.path / TRAJECTORIES
        if not file.is_file():
            self._tell(f"{file}: is missing", lost=True)
            return
        with file.open("rb") as opened:
            for encoded in records(opened, condition):
                trajectory = decoded(encoded, file)
                if not forgotten.has_group(trajectory.group_id):
                    there += trajectory.group_id in groups
                    yield trajectory
        if (missing := sum(row.get("trajectories", 0) for row in rows) - there) > 0:
            self._tell(f"{file}: lacks {missing:,} trajectories of batches that {METRICS} names", lost=True)

    def _rows(self, name: str, fits: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        return list(self._iterate(name, fits))

    def _iterate(self, name: str, fits: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
        found, strange = SealedRows(self.path / name), 0
        for row in iterate_rows(found):
            if fits(row):
                yield row
            else:
                strange += 1
        for line in found.told():
            self._tell(line, lost=bool(found.damaged))
        if strange:
            self._tell(
                f"{self.path / name}: {strange} lines lack required fields and are left out", lost=True
            )

    def _tell(self, line: str, *, lost: bool = False) -> None:
        self._told[line] = None
        self._lost = self._lost or lost


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:LOST_NAMED])) + (" …" if len(steps) > LOST_NAMED else "")


def is_metrics_row(row: Mapping[str, Any]) -> bool:
    """Whether a line of `metrics.jsonl` has the fields that readers need."""
    return (
        isinstance(row.get("mode"), str)
        and isinstance(row.get("step"), int)
        and isinstance(row.get("groups"), list)
    )


def _is_costs(row: dict[str, Any]) -> bool:
    return isinstance(row.get("rollout_id"), str) and isinstance(row.get("used"), list)


def is_failure_row(row: Mapping[str, Any]) -> bool:
    """Whether a line of `failures.jsonl` has the fields that readers need."""
    return isinstance(row.get("rollout_id"), str) and isinstance(row.get("reason"), str)


def is_draws_row(row: Mapping[str, Any]) -> bool:
    """Whether a line of `draws.jsonl` has the fields of a draw, of an outcome, or of a group without one."""
    if not isinstance(row.get("group"), int):
        return False
    if "slot" in row:
        return all(key in row for key in ("tag", "level", "members", "in_order"))
    return "solved" not in row or ("members" in row and "tokens" in row)


def read_settings(path: Path) -> Any:
    """A run's configuration as plain data; raises a `FormatError` that names the file."""
    file = path / CONFIG
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or LAST_SETTING not in content:
            raise ValueError(f"it has no `{LAST_SETTING}`, which a run writes last")
        return content
    except (yaml.YAMLError, ValueError) as error:
        raise FormatError(
            f"{file}: is damaged: {' '.join(str(error).split())}; without it, `rollwright resume {path}` takes the "
            "settings from the run's store"
        ) from error
