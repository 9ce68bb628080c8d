"""The record of a training run: which batches were handed over, in which order, with all their trajectories.

Always true: a batch stands in `metrics.jsonl` before it is trained on, and its trajectories are on disk before it
does. So the record is never behind the trainer, and whatever the trainer did can be done again from it: from the base
model, or where its first steps are forgotten (`retention`), from any checkpoint that is kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""Folder of a run with the figures of every step; it is there as soon as a run trains."""


def is_training(run: Path) -> bool:
    """Whether this run folder belongs to a training run, which must not be gone on with without a trainer."""
    return (run / FIGURES).is_dir()


@dataclass(frozen=True)
class RecordedBatch:
    """One batch as it was handed over."""

    row: Mapping[str, Any]
    """Its line in `metrics.jsonl`."""
    groups: Sequence[Sequence[Trajectory]]
    """In the order of the batch, members in theirs."""


def training_rows(reader: RunReader) -> list[dict[str, Any]]:
    """The lines of the training batches, in the order they were handed over; without those that are forgotten."""
    rows = [row for row in reader.metrics() if row["mode"] == "train"]
    for step, row in enumerate(rows, reader.forgotten().steps):
        if row["step"] != step:
            raise FormatError(f"{reader.path}: its record has step {row['step']} where {step} is expected")
    return rows


def recorded_batches(reader: RunReader, rows: Iterable[Mapping[str, Any]]) -> Iterator[RecordedBatch]:
    """The batches of these lines. The log of trajectories is read once, as far as each batch needs it.

    It holds every trajectory as it was played; the run's filters, which are pure, make of it what was handed over.
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
    """The lines of a run's batches, without those that are forgotten, and where in the record each of them ends."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = (), start: Position | None = None) -> None:
        """`start`: what is forgotten."""
        self._rows: list[Mapping[str, Any]] = []
        self._positions = [start or Position()]
        """Before the first line, and after each one."""
        for row in rows:
            self.append(row)

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Those that are not forgotten."""
        return self._rows

    @property
    def start(self) -> Position:
        """Up to where it is forgotten."""
        return self._positions[0]

    @property
    def steps(self) -> int:
        """Of the whole record."""
        return self._positions[-1].step

    def append(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        self._positions.append(_after(self._positions[-1], row["groups"]))

    def position(self, step: int) -> Position:
        """The place before this step, which must not be forgotten."""
        if not self.start.step <= step <= self.steps:
            raise ValueError(f"step {step} is not in the record, which has {self.start.step} to {self.steps}")
        return self._positions[step - self.start.step]

    def since(self, step: int) -> Sequence[Mapping[str, Any]]:
        """The lines from this step on."""
        return self._rows[max(0, step - self.start.step) :]

    def before(self, step: int) -> Sequence[Mapping[str, Any]]:
        """The lines up to this step, without it."""
        return self._rows[: max(0, step - self.start.step)]

    def forget(self, step: int) -> None:
        """The lines up to this step go; all places from there on stay what they were."""
        gone = step - self.start.step
        del self._rows[:gone], self._positions[:gone]

    def check(self, kept: Mapping[str, Any], where: str) -> int:
        """The step that a checkpoint stands at, by what was kept with it; a `FormatError` where the record is not the
        one that it was made with."""
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
    """What checkpoints were kept with before records could be forgotten; of no use without all lines."""
    return sha256("\n".join(group for row in rows for group in row["groups"]).encode()).hexdigest()


def trained_in(row: Mapping[str, Any]) -> tuple[int, int]:
    """Own episodes of a batch, and their sampled tokens."""
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
    """What is forgotten when the steps before `cut` are, too.

    `floor`: own groups below it are settled, and in no line that is kept; `settled` and `generated`: what became of those
    that were above the floor before, and their lengths; `validated`: of the validations before `cut`. `played`: whether the run plays, or trains on a recorded one.
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
