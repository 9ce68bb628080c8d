"""The record of a training run: the delivered batches in their order, with all their trajectories.

Invariant: a batch stands in `metrics.jsonl` before it is trained on, and its trajectories are on the disk before it does. The
record is therefore never behind the trainer, and every training step can be repeated from it: from the base model, or, if
its first steps are pruned (`retention`), from any kept checkpoint.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rollwright.errors import FormatError
from rollwright.rollout import Ledger
from rollwright.rollout.filters import Catches, build_filters, judge, judge_group
from rollwright.run.folder import RunReader
from rollwright.run.retention import Forgotten, Position, own_index
from rollwright.run.trajectory_log import TRAJECTORIES
from rollwright.trajectory import Trajectory

FIGURES = "training"
"""Folder of a run with the figures of every step; it exists as soon as a run trains."""


def is_training(run: Path) -> bool:
    """Whether this run folder belongs to a training run, which only a training may resume."""
    return (run / FIGURES).is_dir()


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The trainer's figures of each step, if the run writes them as JSON lines; validations and a partial line are left out."""
    file = run / FIGURES / "metrics.jsonl"
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and "tokens" in row:
                found.append(row)
    return found


@dataclass(frozen=True)
class RecordedBatch:
    """One delivered batch."""

    row: Mapping[str, Any]
    """Its line in `metrics.jsonl`."""
    groups: Sequence[Sequence[Trajectory]]
    """Groups in the order of the batch, each with its members in order."""


def training_rows(reader: RunReader) -> list[dict[str, Any]]:
    """Lines of the delivered training batches in order, without pruned ones."""
    rows = [row for row in reader.metrics() if row["mode"] == "train"]
    for step, row in enumerate(rows, reader.forgotten().steps):
        if row["step"] != step:
            raise FormatError(f"{reader.path}: its record has step {row['step']} where {step} is expected")
    return rows


def recorded_batches(reader: RunReader, rows: Iterable[Mapping[str, Any]]) -> Iterator[RecordedBatch]:
    """Yield the batches of these lines; the log is read once, only as far as each batch needs it.

    The log holds every trajectory as it was played. The run's filters, which are pure, reproduce the delivered ones.
    """
    rows = list(rows)
    manager = reader.config.train_env_manager
    filters = () if manager is None else build_filters(manager)
    catches = Catches()
    wanted = {group for row in rows for group in row["groups"]}
    found: dict[str, list[Trajectory]] = {}
    left = reader.trajectories()
    for row in rows:
        while sum(len(found.get(group, ())) for group in row["groups"]) < row["trajectories"]:
            trajectory = next(left, None)
            if trajectory is None:
                raise FormatError(
                    f"{reader.path}: the batch of step {row['step']} names trajectories that {TRAJECTORIES} lacks"
                )
            if trajectory.group_id in wanted:
                judged = judge(filters, trajectory, catches)
                if judged.dropped is None:
                    found.setdefault(trajectory.group_id, []).append(judged.trajectory)
        groups = [sorted(found.pop(group), key=_member) for group in row["groups"]]
        yield RecordedBatch(row, [judge_group(filters, group, catches)[0] for group in groups])


def _member(trajectory: Trajectory) -> int:
    return int(trajectory.rollout_id.rpartition("-m")[2])


class TrainingRecord:
    """Lines of a run's batches without pruned ones, and the position behind each of them."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = (), start: Position | None = None) -> None:
        """`start`: end of the pruned steps."""
        self._rows: list[Mapping[str, Any]] = []
        self._positions = [start or Position()]
        """Position before the first line, and behind each line."""
        for row in rows:
            self.append(row)

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Lines that are not pruned."""
        return self._rows

    @property
    def start(self) -> Position:
        """End of the pruned steps."""
        return self._positions[0]

    @property
    def steps(self) -> int:
        """Steps of the whole record, pruned ones included."""
        return self._positions[-1].step

    def append(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        self._positions.append(_after(self._positions[-1], row["groups"]))

    def position(self, step: int) -> Position:
        """Position before this step, which must not be pruned."""
        if not self.start.step <= step <= self.steps:
            raise ValueError(f"step {step} is not in the record, which has {self.start.step} to {self.steps}")
        return self._positions[step - self.start.step]

    def since(self, step: int) -> Sequence[Mapping[str, Any]]:
        """Lines from this step on."""
        return self._rows[max(0, step - self.start.step) :]

    def before(self, step: int) -> Sequence[Mapping[str, Any]]:
        """Lines before this step."""
        return self._rows[: max(0, step - self.start.step)]

    def forget(self, step: int) -> None:
        """Drop the lines before this step; later positions do not change."""
        gone = step - self.start.step
        del self._rows[:gone], self._positions[:gone]

    def check(self, kept: Mapping[str, Any], where: str) -> int:
        """Step of a checkpoint, by the position that it keeps; raises a `FormatError` if the record has other batches."""
        step = kept.get("step")
        if isinstance(step, int) and self.start.step <= step <= self.steps:
            if dict(kept) == asdict(self.position(step)):
                return step
            if not self.start.step and kept.get("digest") == _flat_digest(self.before(step)):
                return step
        raise FormatError(
            f"{where}: the batches that this checkpoint was trained on are not those of the record"
        )


def _after(position: Position, groups: Sequence[str]) -> Position:
    chain = sha256("\n".join([position.chain, *groups]).encode()).hexdigest()
    return Position(position.step + 1, position.groups + len(groups), chain)


def _flat_digest(rows: Iterable[Mapping[str, Any]]) -> str:
    """Digest of an older checkpoint format, from before pruning; it needs all lines."""
    return sha256("\n".join(group for row in rows for group in row["groups"]).encode()).hexdigest()


def trained_in(row: Mapping[str, Any]) -> tuple[int, int]:
    """Number of own episodes in a batch, and their sampled tokens."""
    return row.get("own", row["trajectories"]), row["tokens"]


def forgotten_with(
    before: Forgotten,
    record: TrainingRecord,
    cut: int,
    *,
    floor: int,
    settled: Ledger,
    generated: Iterable[int],
    played: bool,
    validated: Ledger | None = None,
) -> Forgotten:
    """Pruned steps if the steps before `cut` are pruned, too.

    Args:
        floor: Own groups below this index are settled, and in no kept line.
        settled: Ledger of the groups between the old floor and the new one.
        generated: Sampled tokens of the rollouts of these groups.
        played: Whether the run plays, instead of training on a recorded run.
        validated: Ledger of the validations before `cut`.
    """
    gone = record.before(cut)
    ledger, validations, bias = Ledger(), Ledger(), replace(before.bias)
    for total, parts in (
        (ledger, (before.ledger, settled)),
        (validations, (before.validated, validated or Ledger())),
    ):
        for part in parts:
            total.add(part)
    for length in generated:
        bias.add_generated(length)
    for row in gone if played else ():
        bias.add_trained(*trained_in(row))
    groups = [*before.delivered, *(group for row in gone for group in row["groups"])]
    own = {group: index for group in groups if (index := own_index(before.name, group)) is not None}
    return Forgotten(
        name=before.name,
        position=record.position(cut),
        floor=floor,
        delivered=tuple(group for group, index in own.items() if index >= floor),
        foreign=frozenset(groups) - own.keys(),
        ledger=ledger,
        validated=validations,
        bias=bias,
    )
