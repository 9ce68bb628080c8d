"""The record of pruned steps, the rules for pruning more, and numbered folders such as checkpoints.

Invariants: `forgotten.json` is on the disk before anything that it names is removed, and every reader of a run skips the
steps that it names. A run killed in between therefore shows the same steps, and removes the rest when it resumes. No step
that a kept checkpoint needs, and no unsettled group, is pruned.
"""

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollwright.errors import FormatError, naming
from rollwright.rollout.accounting import Ledger
from rollwright.run.sealed_rows import read_sealed, seal
from rollwright.run.trajectory_log import flush_through, flush_to_disk
from rollwright.training.pipeline import LengthBias

FORGOTTEN = "forgotten.json"

FORMAT = 1


@dataclass(frozen=True)
class Position:
    """Position in the record: number of steps and groups before it, and a digest of the groups."""

    step: int = 0
    groups: int = 0
    chain: str = ""
    """Digest over the groups of each step and the digest before it."""


@dataclass(frozen=True)
class Forgotten:
    """Pruned steps of a run, and the facts about them that resuming it needs."""

    name: str = ""
    """Name of the run."""
    position: Position = Position()
    """End of the pruned part of the record: all steps and validations before it are pruned."""
    floor: int = 0
    """Own training groups with a lower index are pruned."""
    delivered: Sequence[str] = ()
    """Own groups of pruned steps from `floor` on, which must not be delivered again."""
    foreign: frozenset[str] = frozenset()
    """Groups of other peers in the steps that were pruned last."""
    ledger: Ledger = field(default_factory=Ledger)
    """Fates of the rollouts of groups below `floor`."""
    bias: LengthBias = field(default_factory=LengthBias)
    """Lengths of the episodes trained on in pruned steps, and of those generated in groups below `floor`."""
    validated: Ledger = field(default_factory=Ledger)
    """Fates of the rollouts of pruned validations."""

    @property
    def steps(self) -> int:
        return self.position.step

    def has_group(self, group_id: str) -> bool:
        """Whether this group is pruned."""
        if not self.steps:
            return False
        if (own := _own(self.name, group_id)) is None:
            return group_id in self.foreign
        stream, index = own
        return index < self.floor if stream is None else stream < self.steps

    def has_rollout(self, rollout_id: str) -> bool:
        return self.has_group(rollout_id.rpartition("-m")[0])

    def has_row(self, row: Mapping[str, Any]) -> bool:
        """Whether this line of the record is pruned."""
        return int(row["step"]) < self.steps


def _own(name: str, group_id: str) -> tuple[int | None, int] | None:
    """Validation number (`None` for training) and index of a run's own group; `None` for a group of another peer."""
    if not group_id.startswith(f"{name}."):
        return None
    found = re.fullmatch(r"(?:train|val(\d+))-g(\d+)", group_id[len(name) + 1 :])
    return None if found is None else (None if found[1] is None else int(found[1]), int(found[2]))


def own_index(name: str, group_id: str) -> int | None:
    """Index of a group in the run's training stream; `None` if it is not part of it."""
    own = _own(name, group_id)
    return own[1] if own is not None and own[0] is None else None


def lowest_index(name: str, rows: Iterable[Mapping[str, Any]]) -> int | None:
    """Lowest index of the own training groups in these lines."""
    found = (own_index(name, group) for row in rows for group in row["groups"])
    return min((each for each in found if each is not None), default=None)


def next_cut(keep: int | None, *, forgotten: int, done: int, oldest_checkpoint: int) -> int | None:
    """Step before which to prune now; `None` to prune nothing.

    Pruning waits until `keep` steps can go, so that the remaining log is rewritten once in `keep` steps.
    """
    if keep is None:
        return None
    cut = min(oldest_checkpoint, done - keep)
    return cut if cut - forgotten >= keep else None


def read_forgotten(run: Path) -> Forgotten:
    file = run / FORGOTTEN
    try:
        content, _ = read_sealed(file)
    except FileNotFoundError:
        return Forgotten()
    try:
        if content["format"] != FORMAT:
            raise FormatError(f"{file}: has format {content['format']}; accepted: {FORMAT}")
        return Forgotten(
            name=str(content["name"]),
            position=Position(**content["position"]),
            floor=int(content["floor"]),
            delivered=tuple(content["delivered"]),
            foreign=frozenset(content["foreign"]),
            ledger=Ledger.of(content["ledger"]),
            validated=Ledger.of(content["validated"]) if "validated" in content else Ledger(),
            bias=LengthBias(**content["bias"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{file}: does not name the pruned steps: {error!r}") from error


def write_forgotten(run: Path, forgotten: Forgotten) -> None:
    """Write `forgotten.json` and sync it to the disk."""
    content = {
        "format": FORMAT,
        "name": forgotten.name,
        "position": asdict(forgotten.position),
        "floor": forgotten.floor,
        "delivered": list(forgotten.delivered),
        "foreign": sorted(forgotten.foreign),
        "ledger": forgotten.ledger.row(),
        "validated": forgotten.validated.row(),
        "bias": asdict(forgotten.bias),
    }
    replace_durably(run / FORGOTTEN, seal(content, indent=1) + "\n")


def replace_durably(file: Path, text: str) -> None:
    """Replace a file atomically and sync it: after a power cut it has the old or the new content."""
    partial = file.with_name(f"{file.name}.partial")
    with naming(partial), partial.open("wb") as opened:
        opened.write(text.encode())
        flush_through(opened)
    partial.replace(file)
    flush_to_disk(file.parent)


def numbered(place: Path) -> list[Path]:
    """Subfolders that are named by a number, the highest last."""
    found = [each for each in place.iterdir() if each.name.isdigit()] if place.is_dir() else []
    return sorted(found, key=lambda each: int(each.name))


def keep_last(place: Path, count: int) -> None:
    """Delete all numbered subfolders but the last `count`."""
    for old in numbered(place)[:-count]:
        shutil.rmtree(old)
