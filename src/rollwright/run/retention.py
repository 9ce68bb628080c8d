"""What a training run has forgotten, and when it may forget more. Pure but for one small file.

Always true: `forgotten.json` is on the disk before anything that it names is removed, and whoever reads a run leaves out
what it names. So it does not matter how much of that is removed yet: a run that is killed in between shows the same, and
removes the rest when it is gone on with. Nothing is forgotten that a kept checkpoint needs, or that is not settled.

Folders that are named by a number, such as checkpoints and weights, of which the last ones are kept.

The older batches of a run that only plays are forgotten, where `keep_steps` is set; training does it by its own rules.

Always true: as in `retention`. Nothing is forgotten that is not settled, and no validation that is under way; the ledger
goes on counting what is forgotten.

The store's copies of finished trajectories are given up, once the run's own log has them on the disk.

Always true: a trajectory is released after the log was flushed to the disk with it, never before; so at every moment,
through kills and power cuts, it is whole in the store or in the log. Both have it for a while, a bounded amount at a time:
one flush serves them all, and nobody who plays waits for it.
"""

import asyncio
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollwright.config import RunConfig
from rollwright.errors import FormatError, naming
from rollwright.rollout.accounting import Ledger
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.run import Run
from rollwright.run.sealed_rows import read_sealed, seal
from rollwright.run.training_record import TrainingRecord, forgotten_with
from rollwright.run.trajectory_log import TrajectoryLog, flush_through, flush_to_disk
from rollwright.store.api import Store
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


class BatchRetention:
    def __init__(self, config: RunConfig, folder: RunFolder, forgotten: Forgotten) -> None:
        """`forgotten`: by earlier processes."""
        self._config = config
        self._folder = folder
        self.forgotten = forgotten if forgotten.steps else Forgotten(config.name)

    @property
    def is_on(self) -> bool:
        return self._config.keep_steps is not None or bool(self.forgotten.steps)

    async def forget(self, run: Run, done: int, under_way: Iterable[int]) -> None:
        """Forgets what is older than `keep_steps`, if it is worth it. All steps before `done` are done; `under_way`:
        the validations that are not."""
        before = self.forgotten
        oldest = min([done, *under_way])
        cut = next_cut(self._config.keep_steps, forgotten=before.steps, done=done, oldest_checkpoint=oldest)
        if cut is None:
            return
        rows = [row for row in RunReader(self._folder.path).metrics() if row["mode"] == "train"]
        record = TrainingRecord(sorted(rows, key=lambda row: int(row["step"])), before.position)
        floor, settled = run.settle(lowest_index(self._config.name, record.since(cut)))
        self.forgotten = forgotten = forgotten_with(
            before,
            record,
            cut,
            floor=floor,
            settled=settled,
            generated=(),
            played=False,
            validated=run.settle_validations(cut),
        )
        await asyncio.to_thread(write_forgotten, self._folder.path, forgotten)
        # From here on it is forgotten. What follows removes it, and is done again by whoever goes on after a crash.
        self._folder.remove(await asyncio.to_thread(self._folder.copy_kept, forgotten))
        await run.forget(forgotten)


RELEASED_AT_ONCE = 256
"""Trajectories that share a flush: often enough to keep the store small, seldom enough to cost a rollout nothing."""
RELEASED_BYTES = 4 * 2**20
"""Or so much of them, so that long episodes do not pile up in the store."""


class Releasing:
    """Of one run; belongs to its event loop."""

    def __init__(self, store: Store, log: TrajectoryLog) -> None:
        self._store = store
        self._log = log
        self._due: list[str] = []
        self._bytes = 0

    def add(self, rollout_id: str, size: int) -> None:
        """One that the log was given."""
        self._due.append(rollout_id)
        self._bytes += size

    async def release_some(self) -> None:
        """If there are enough of them."""
        if len(self._due) >= RELEASED_AT_ONCE or self._bytes >= RELEASED_BYTES:
            await self.release_all()

    async def release_all(self) -> None:
        due, self._due, self._bytes = self._due, [], 0
        await self.release(due)

    async def release(self, rollout_ids: Sequence[str]) -> None:
        """Those of them that the log has."""
        kept = [each for each in rollout_ids if each in self._log]
        if not kept:
            return
        await asyncio.to_thread(self._log.sync())
        for first in range(0, len(kept), RELEASED_AT_ONCE):
            await self._store.release_trajectories(kept[first : first + RELEASED_AT_ONCE])
