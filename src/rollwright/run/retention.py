"""The record of pruned steps, the rules for pruning more, and numbered folders such as checkpoints.

Invariants: `forgotten.json` is on the disk before anything that it names is removed, and every reader of a run leaves out
what it names. A run killed in between therefore shows the same steps, and removes the rest when it resumes. Nothing is
pruned that a kept checkpoint needs, or that is not settled.
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
    """A place in the record: how much of it there is, and which groups. Whoever knows one can go on from it."""

    step: int = 0
    groups: int = 0
    chain: str = ""
    """Digest of the groups of every step, and of the chain before it."""


@dataclass(frozen=True)
class Forgotten:
    """What is not in a run's folder any more, and what has to be known of it to go on."""

    name: str = ""
    """Of the run."""
    position: Position = Position()
    """Up to where the record is forgotten: all steps before it, and the validations before it."""
    floor: int = 0
    """Of the run's own groups, those with a lower index."""
    delivered: Sequence[str] = ()
    """Own groups of forgotten steps from `floor` on: they must not be handed out again."""
    foreign: frozenset[str] = frozenset()
    """Groups of others in the steps that were forgotten last."""
    ledger: Ledger = field(default_factory=Ledger)
    """What became of the groups below `floor`."""
    bias: LengthBias = field(default_factory=LengthBias)
    """Lengths of what was trained on in forgotten steps, and of what was generated in groups below `floor`."""
    validated: Ledger = field(default_factory=Ledger)
    """What became of the rollouts of forgotten validations."""

    @property
    def steps(self) -> int:
        return self.position.step

    def has_group(self, group_id: str) -> bool:
        """Whether this group is among what is forgotten."""
        if not self.steps:
            return False
        if (own := _own(self.name, group_id)) is None:
            return group_id in self.foreign
        stream, index = own
        return index < self.floor if stream is None else stream < self.steps

    def has_rollout(self, rollout_id: str) -> bool:
        return self.has_group(rollout_id.rpartition("-m")[0])

    def has_row(self, row: Mapping[str, Any]) -> bool:
        """Whether this line of the record is forgotten."""
        return int(row["step"]) < self.steps


def _own(name: str, group_id: str) -> tuple[int | None, int] | None:
    """Of a run's own group, the number of its validation (`None`: it was for training) and its index."""
    if not group_id.startswith(f"{name}."):
        return None
    found = re.fullmatch(r"(?:train|val(\d+))-g(\d+)", group_id[len(name) + 1 :])
    return None if found is None else (None if found[1] is None else int(found[1]), int(found[2]))


def own_index(name: str, group_id: str) -> int | None:
    """The place of a group in the run's training stream; `None`: it is not of that."""
    own = _own(name, group_id)
    return own[1] if own is not None and own[0] is None else None


def lowest_index(name: str, rows: Iterable[Mapping[str, Any]]) -> int | None:
    """The first of the own groups that these lines name."""
    found = (own_index(name, group) for row in rows for group in row["groups"])
    return min((each for each in found if each is not None), default=None)


def next_cut(keep: int | None, *, forgotten: int, done: int, oldest_checkpoint: int) -> int | None:
    """Up to which step to forget now; `None`: nothing. It is put off until there are `keep` steps to forget, so that
    what is kept is written anew once in so many steps."""
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
        raise FormatError(f"{file}: does not say what is forgotten: {error!r}") from error


def write_forgotten(run: Path, forgotten: Forgotten) -> None:
    """When it returns, it is on the disk."""
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
    """The file has this content or the one before, whenever the machine stops; the new one when this returns."""
    partial = file.with_name(f"{file.name}.partial")
    with naming(partial), partial.open("wb") as opened:
        opened.write(text.encode())
        flush_through(opened)
    partial.replace(file)
    flush_to_disk(file.parent)


def numbered(place: Path) -> list[Path]:
    """The folders in it that are named by a number, the highest last."""
    found = [each for each in place.iterdir() if each.name.isdigit()] if place.is_dir() else []
    return sorted(found, key=lambda each: int(each.name))


def keep_last(place: Path, count: int) -> None:
    for old in numbered(place)[:-count]:
        shutil.rmtree(old)
