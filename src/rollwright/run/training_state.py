"""State of a training run beside its weights: the record of its batches, its counters, and the steps that were pruned.

Invariants:
- A checkpoint and the record together restore this state exactly: a checkpoint keeps the counters that only the trainer
  knows, and everything else is computed from the record and the log.
- Each own rollout counts once in the length statistics, however often its completion is delivered.
"""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollwright.errors import FormatError
from rollwright.rollout import Ledger
from rollwright.run.folder import METRICS, RunFolder, RunReader
from rollwright.run.retention import Forgotten, numbered, own_index
from rollwright.run.training_record import TrainingRecord, forgotten_with, trained_in, training_rows
from rollwright.run.trajectory_log import TRAJECTORIES, flush_to_disk
from rollwright.training.advantages import Remembering, left_out
from rollwright.training.pipeline import LengthBias
from rollwright.training.report import StepReport
from rollwright.training.rows import untrained_turns
from rollwright.trajectory import Trajectory

if TYPE_CHECKING:
    from rollwright.run.build_training import AnyTrainer


class GeneratedLengths:
    """Sampled tokens of the run's own training rollouts, each counted once.

    `bias` covers all of them. Single rollouts are remembered only until their group is pruned, because no completion of
    a pruned group is delivered again.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the run."""
        self.bias = LengthBias()
        self._name = name
        self._tokens: dict[str, int] = {}
        """Sampled tokens by rollout."""

    def __len__(self) -> int:
        """Remembered rollouts."""
        return len(self._tokens)

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished rollout; validations and groups of other peers are ignored."""
        rollout_id = trajectory.rollout_id
        if own_index(self._name, trajectory.group_id) is not None and rollout_id not in self._tokens:
            self._tokens[rollout_id] = trajectory.sampled_tokens
            self.bias.add_generated(trajectory.sampled_tokens)

    def prune(self, floor: int) -> list[int]:
        """Drop the rollouts of groups below `floor` and return their lengths; `bias` does not change."""
        old = [each for each in self._tokens if self._index(each) < floor]
        return [self._tokens.pop(each) for each in old]

    def _index(self, rollout_id: str) -> int:
        index = own_index(self._name, rollout_id.rpartition("-m")[0])
        assert index is not None, "`add` takes own rollouts only"
        return index


class TrainingState:
    """Record, counters and pruned steps of one training run."""

    def __init__(self, name: str) -> None:
        """`name`: of the run."""
        self.record = TrainingRecord()
        self.lengths = GeneratedLengths(name)
        self.staleness: Counter[int] = Counter()
        """Trained tokens by their age at hand-over, in policy versions."""
        self.left_out: Counter[str] = Counter()
        """Trajectories of batches that gave no row, and single turns outside the loss, by reason."""
        self.validations: list[dict[str, Any]] = []
        """Step, reward and success of each validation that is not pruned."""
        self.forgotten = Forgotten(name)
        """Steps that were pruned from the folder."""
        self._name = name

    @property
    def bias(self) -> LengthBias:
        return self.lengths.bias

    def read_record(self, reader: RunReader) -> None:
        """Read the batches and the pruned steps of an earlier process."""
        if (forgotten := reader.forgotten()).steps:
            self.forgotten = forgotten
        self.record = TrainingRecord(training_rows(reader), self.forgotten.position)

    def read_lengths(self, reader: RunReader) -> None:
        """Count the lengths that an earlier process has generated and trained on."""
        self.bias.add(self.forgotten.bias)
        for row in self.record.rows:
            self.bias.add_trained(*trained_in(row))
        for trajectory in reader.trajectories():
            self.lengths.add(trajectory)

    def is_own(self, group_id: str) -> bool:
        """Whether the group is of this run's training stream, and not of another peer."""
        return group_id.startswith(f"{self._name}.train-")

    def delivered(self) -> list[str]:
        """Own groups that were delivered, as far as the scheduler still has to know them."""
        rows = self.record.rows
        return [
            *self.forgotten.delivered,
            *(group for row in rows for group in row["groups"] if self.is_own(group)),
        ]

    def add_step(self, report: StepReport) -> None:
        self.staleness.update(report.staleness)

    def add_left_out(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        self.left_out.update(left_out(groups))
        self.left_out.update(untrained_turns(groups))

    def add_validation(self, step: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the validation's figures."""
        figures = {name: row[name] for name in ("reward", "success") if row.get(name) is not None}
        self.validations.append({"step": step, **figures})
        return figures

    def figures(self) -> dict[str, float]:
        """Figures for the metric writers."""
        lengths = {f"length/{name}": value for name, value in self.bias.row().items() if value is not None}
        return lengths | {f"left_out/{reason}": count for reason, count in self.left_out.items()}

    def save(
        self,
        trainer: "AnyTrainer",
        folder: RunFolder,
        place: Path,
        step: int,
        advantage: Remembering | None = None,
    ) -> None:
        """Write a checkpoint of the trainer, these counters, and the memory of the advantage."""
        for name in (TRAJECTORIES, METRICS):  # the record is on the disk before a checkpoint refers to it
            flush_to_disk(folder.path / name)
        position = asdict(self.record.position(step))
        counters = {"staleness": dict(self.staleness), "left_out": dict(self.left_out)}
        memory = {} if advantage is None else {"advantage": advantage.state()}
        trainer.save(place, {"record": position, **counters, **memory})

    def restore(
        self,
        trainer: "AnyTrainer",
        folder: RunFolder,
        checkpoints: Path,
        advantage: Remembering | None = None,
    ) -> int:
        """Restore the newest intact checkpoint; returns its step, or 0 if there is none. Damaged ones are kept aside."""
        for place in reversed(numbered(checkpoints)):
            try:
                extra = trainer.restore(place)
            except FormatError as error:
                folder.tell(f"{error}; its steps are trained again from the record")
                aside = place.with_name(f".{place.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                place.rename(aside)
                continue
            step = self.record.check(extra["record"], str(place))
            self.staleness.update({int(age): count for age, count in extra["staleness"].items()})
            self.left_out.update(extra["left_out"])
            if advantage is not None:
                advantage.restore(extra.get("advantage", {}))
            return step
        if self.forgotten.steps:
            # The batches from the base model to here are gone, so that only a checkpoint could have given the weights.
            raise FormatError(
                f"{checkpoints}: no checkpoint is intact, and the first {self.forgotten.steps} steps, "
                "which would be trained again, were removed (training.keep_steps)"
            )
        return 0

    def plan_pruning(
        self, cut: int, *, floor: int, settled: Ledger, validated: Ledger, played: bool
    ) -> Forgotten:
        """Pruned steps if the steps before `cut` are pruned, too; see `training_record.forgotten_with`."""
        return forgotten_with(
            self.forgotten,
            self.record,
            cut,
            floor=floor,
            settled=settled,
            validated=validated,
            generated=self.lengths.prune(floor),
            played=played,
        )

    def prune(self, forgotten: Forgotten) -> None:
        """Drop the steps that `forgotten.json` names on the disk already."""
        self.forgotten = forgotten
        self.record.forget(forgotten.steps)
        self.validations = [each for each in self.validations if each["step"] >= forgotten.steps]
