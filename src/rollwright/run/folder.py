"""One run's folder: the configuration as used, every finished trajectory, metrics, failures, the summary.

Always true: what was written stays readable, until the run forgets it (`retention`): then no reader shows it any more,
removed or not. Its log (`trajectory_log`) is the truth about finished trajectories: a store gives up its copy once the
log has one on the disk. Whatever is wrong with a file is told by whoever reads it, and costs what cannot be read of that
file and nothing else. One process at a time writes.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rollwright.addresses import without_password
from rollwright.errors import FormatError, RollwrightError, naming
from rollwright.run.log_records import LogCondition, decoded, records
from rollwright.run.retention import Forgotten, read_forgotten, replace_durably
from rollwright.run.sealed_rows import Rows, read_rows, read_sealed, seal
from rollwright.run.trajectory_log import TRAJECTORIES, LogCopy, TrajectoryLog
from rollwright.trajectory import Trajectory

if TYPE_CHECKING:
    from rollwright.config import RunConfig

_log = logging.getLogger(__name__)

CONFIG, METRICS, FAILURES, SUMMARY, STORE, ADDRESS = (
    "config.yaml",
    "metrics.jsonl",
    "failures.jsonl",
    "summary.json",
    "store.db",
    "store.address",
)


SIMULATED = "SIMULATED"
"""Stands in every title of a run that the simulated engine has played: its figures say nothing of a model."""

LAST_SETTING = "custom_envs"
"""A configuration is written with every default filled in, so one without this is cut off."""

LOST_NAMED = 5
"""Of what is lost, so many are named."""


class RunFolder:
    """A folder being written."""

    def __init__(self, path: Path, log: TrajectoryLog, failed: dict[str, str]) -> None:
        self.path = path
        self.log = log
        self.failed = failed
        """Rollouts whose failures are told, with the reasons."""
        self.repairs: list[str] = []
        """What was wrong when the folder was reopened, and what was done about it; a line each."""
        self.lost: list[str] = []
        """Rollouts that were finished, and whose trajectories nobody has any more."""
        self.store_is_new = False
        """Whether its store was lost, which is told already, and knows nothing of what was finished."""
        self.on_repair: Callable[[str], None] = _log.warning
        """Is told of every further line."""

    @classmethod
    def create(cls, runs: Path, config: "RunConfig") -> tuple["RunFolder", "RunConfig"]:
        """`runs/NAME`, or with a number behind it when that exists: no run overwrites another.

        Also gives the configuration with the name that the run has now.
        """
        name, number = config.name, 2
        while (runs / name).exists():
            name = f"{config.name}-{number}"
            number += 1
        config = config.model_copy(update={"name": name})
        return cls.begin(runs / name, config), config

    @classmethod
    def begin(cls, path: Path, config: "RunConfig") -> "RunFolder":
        """A new run in this very folder, which may exist but must not be a run."""
        path.mkdir(parents=True, exist_ok=True)
        if (path / CONFIG).exists():
            raise RollwrightError(f"{path}: is a run already")
        folder = cls(path, TrajectoryLog.create(path / TRAJECTORIES), {})
        folder.keep_settings(config)  # last: with it the folder is a run
        return folder

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Goes on with a folder; what a crash left half written is cut off, what is damaged is kept aside."""
        reader = RunReader(path)
        forgotten = reader.forgotten()
        file = path / TRAJECTORIES
        repairs: list[str] = []
        if file.exists():
            log, condition = TrajectoryLog.reopen(file)
            repairs += condition.told(file)
        else:
            log = TrajectoryLog.create(file)
            repairs.append(f"{file}: is missing; begun anew")
        for name in (METRICS, FAILURES):
            repairs += _repair_rows(read_rows(path / name))
        folder = cls(path, log, {row["rollout_id"]: row["reason"] for row in reader.failures()})
        folder.repairs = repairs
        if forgotten.steps:  # it may have been killed while it removed what is forgotten
            folder.remove(folder.copy_kept(forgotten))
        return folder

    def keep_settings(self, config: "RunConfig") -> None:
        """Writes down what the run is played with from now on."""
        from rollwright.config import dump

        partial = self.path / f"{CONFIG}.partial"
        with naming(partial):
            partial.write_text(dump(config), encoding="utf-8")
        partial.replace(self.path / CONFIG)

    def store_address(self, told: str | None) -> str:
        """Where the run's rollouts are: what it is told, what it was told before, or its own file.

        What it is told is remembered without its password; whoever goes on with the run gives it again, best by
        PGPASSWORD.
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
        """Adds it once, however often it is given."""
        self.log.append(rollout_id, encoded)

    def trajectories(self) -> Iterator[Trajectory]:
        """All that were added so far."""
        self.log.flush()
        return RunReader(self.path).trajectories()

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Makes a batch known as handed out; the trajectories are on disk before it is."""
        self.log.flush()
        self._append(METRICS, row)

    def add_failure(self, rollout_id: str, reason: str) -> None:
        """Adds it once, however often it is given."""
        if rollout_id in self.failed:
            return
        self.failed[rollout_id] = reason
        self._append(FAILURES, {"rollout_id": rollout_id, "reason": reason})

    def tell(self, line: str) -> None:
        """What was found to be wrong, and what is done about it."""
        self.repairs.append(line)
        self.on_repair(line)

    def lose(self, rollout_ids: Sequence[str]) -> None:
        self.lost += rollout_ids
        some = ", ".join(rollout_ids[:LOST_NAMED]) + (" …" if len(rollout_ids) > LOST_NAMED else "")
        self.tell(
            f"{self.path}: finished trajectories that are lost, because neither {TRAJECTORIES} nor the store has them any "
            f"more: {len(rollout_ids):,} ({some})"
        )

    def copy_kept(self, forgotten: Forgotten) -> "KeptLog":
        """The first half of removing what is forgotten: a copy of the log without it, beside it. Other threads may write
        to the folder meanwhile."""
        rows = RunReader(self.path).metrics()
        kept = KeptLog(forgotten, {group for row in rows for group in row["groups"]})
        kept.copy = self.log.copy_without(kept.leaves_out)
        return kept

    def remove(self, kept: "KeptLog") -> None:
        """The second half, which is quick: everything in the folder is then without what is forgotten."""
        assert kept.copy is not None
        self.log.become(kept.copy)
        self.failed = {each: why for each, why in self.failed.items() if not kept.leaves_out(each)}
        for name, is_forgotten in (
            (METRICS, kept.forgotten.has_row),
            (FAILURES, lambda row: kept.forgotten.has_rollout(row["rollout_id"])),
        ):
            _remove_rows(self.path / name, is_forgotten)

    def finish(self, summary: Mapping[str, Any]) -> None:
        partial = self.path / f"{SUMMARY}.partial"
        with naming(partial):
            partial.write_text(seal(summary, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path / SUMMARY)
        self.log.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        file = self.path / name
        with naming(file), file.open("a", encoding="utf-8") as opened:
            opened.write(seal(row) + "\n")


class KeptLog:
    """What is left of a run's log without what is forgotten."""

    def __init__(self, forgotten: Forgotten, recorded: Collection[str]) -> None:
        """`recorded`: the groups that stand in the record."""
        self.forgotten = forgotten
        self._recorded = recorded
        self.copy: LogCopy | None = None

    def leaves_out(self, rollout_id: str) -> bool:
        """What is forgotten, and what others have played that came into no batch, because the run was killed."""
        group_id = rollout_id.rpartition("-m")[0]
        foreign = not group_id.startswith(f"{self.forgotten.name}.")
        return self.forgotten.has_group(group_id) or (foreign and group_id not in self._recorded)


def _repair_rows(found: Rows) -> list[str]:
    """Writes a file of rows anew without what is damaged or half written; gives what there is to say."""
    if found.damaged:
        aside = found.file.with_name(f"{found.file.name}.damaged")
        with naming(aside), aside.open("ab") as opened:
            opened.writelines(line + b"\n" for _, line in found.damaged)
    if found.damaged or found.mended or found.cut_off or found.unsealed:
        replace_durably(found.file, _lines(found.rows))
    return list(found.told())


def _remove_rows(file: Path, is_forgotten: Callable[[dict[str, Any]], bool]) -> None:
    rows = read_rows(file).rows
    kept = [row for row in rows if not is_forgotten(row)]
    if len(kept) < len(rows):
        replace_durably(file, _lines(kept))


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(seal(row) + "\n" for row in rows)


class RunReader:
    """A folder being looked at."""

    def __init__(self, path: Path) -> None:
        if not (path / CONFIG).is_file():
            if (path / TRAJECTORIES).is_file():
                raise RollwrightError(
                    f"{path / CONFIG}: is missing; `rollwright resume {path}` takes it from the run's store"
                )
            raise RollwrightError(f"{path}: is not a run folder; one has a {CONFIG}")
        self.path = path
        self.log_condition = LogCondition()
        """Of the trajectory log, as far as it was read last."""
        self._lost = False
        """Whether a file other than the log has lost something."""
        self._told: dict[str, None] = {}
        """What is wrong with the other files, in the order in which it was found."""

    @property
    def cut_off(self) -> bool:
        """Whether the last record read was incomplete."""
        return self.log_condition.cut_off

    @property
    def problems(self) -> list[str]:
        """What was found to be wrong with the files that were read; a line each. Half a record at the end of the log
        is not among it: a run that is killed leaves one."""
        return [*self.log_condition.told(self.path / TRAJECTORIES), *self._told]

    @property
    def is_damaged(self) -> bool:
        """Whether something that was written cannot be read any more."""
        return bool(self.log_condition.damaged or self._lost)

    @property
    def config(self) -> "RunConfig":
        from rollwright.config import build  # a look at a run's results needs no settings models

        return build(read_settings(self.path), source=str(self.path / CONFIG))

    @property
    def simulated(self) -> bool:
        """Whether the simulated engine has played it: then its figures say nothing of a model."""
        known: bool | None = (self.summary() or {}).get("simulated")
        if known is not None:
            return known
        try:  # it has not ended, or an earlier release has written it
            return self.config.plays_simulated
        except RollwrightError:
            return False  # the settings are damaged, which is told where they are needed

    @property
    def title(self) -> str:
        """The run's name as it stands above pictures and pages."""
        return f"{self.config.name} · {SIMULATED}" if self.simulated else self.config.name

    def summary(self) -> dict[str, Any] | None:
        """`None` when the run has not ended, or has left one that cannot be read."""
        file = self.path / SUMMARY
        if not file.is_file():
            return None
        try:
            summary, mended = read_sealed(file)
            if "interrupted" not in summary and "training" not in summary:
                raise FormatError(f"{file}: is damaged: it does not say how the run ended")
        except FormatError as error:
            self._tell(f"{error}; left out", lost=True)
            return None
        if mended:
            self._tell(f"{file}: had a wrong byte, put right by the checksum")
        return summary

    @property
    def ended(self) -> bool:
        """Whether the run came to its own end, neither interrupted nor by an error: there is nothing to go on with."""
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
        """What is not shown any more."""
        return read_forgotten(self.path)

    def shown_steps(self) -> str | None:
        """Which steps there are to show, where it is not all of them."""
        if not (first := self.forgotten().steps):
            return None
        steps = [row["step"] for row in self.metrics() if row["mode"] == "train"]
        setting = "keep_steps" if self.config.training is None else "training.keep_steps"
        return f"steps {first}…{max(steps, default=first)}; earlier ones were forgotten ({setting})"

    def metrics(self) -> list[dict[str, Any]]:
        forgotten = self.forgotten()
        return [row for row in self._rows(METRICS, _is_metrics) if not forgotten.has_row(row)]

    def failures(self) -> list[dict[str, Any]]:
        forgotten = self.forgotten()
        return [
            row for row in self._rows(FAILURES, _is_failure) if not forgotten.has_rollout(row["rollout_id"])
        ]

    def trajectories(self) -> Iterator[Trajectory]:
        """All finished trajectories that are not forgotten, in the order they were finished."""
        forgotten = self.forgotten()
        rows = self.metrics()  # before the log, which has them earlier
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
        found = read_rows(self.path / name)
        for line in found.told():
            self._tell(line, lost=bool(found.damaged))
        rows = [row for row in found.rows if fits(row)]
        if len(rows) < len(found.rows):
            strange = len(found.rows) - len(rows)
            self._tell(
                f"{self.path / name}: {strange} lines do not say what they should, left out", lost=True
            )
        return rows

    def _tell(self, line: str, *, lost: bool = False) -> None:
        self._told[line] = None
        self._lost = self._lost or lost


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:LOST_NAMED])) + (" …" if len(steps) > LOST_NAMED else "")


def _is_metrics(row: dict[str, Any]) -> bool:
    return (
        isinstance(row.get("mode"), str)
        and isinstance(row.get("step"), int)
        and isinstance(row.get("groups"), list)
    )


def _is_failure(row: dict[str, Any]) -> bool:
    return isinstance(row.get("rollout_id"), str) and isinstance(row.get("reason"), str)


def read_settings(path: Path) -> Any:
    """A run's configuration as plain data; a `FormatError` names the file."""
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
