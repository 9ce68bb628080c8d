"""The trainer of rank 0, with the others behind it: the same methods, made on all ranks.

Always true: a rank that dies or does not answer in time ends all ranks; new ones restore the last checkpoint, train the steps
since it again from their rows, and repeat the interrupted call. So no step is in the weights twice, and none is missing.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from rollwright.engines.base import Weights
from rollwright.errors import RollwrightError
from rollwright.hardware import choose_dtype
from rollwright.models import load_model
from rollwright.training.checkpoints import read_manifest
from rollwright.training.ranks.collective import RankFailed, Ranks
from rollwright.training.ranks.commands import Channel, decode_rows, encode_rows, wait_for
from rollwright.training.ranks.group import (
    LOOPBACK,
    SETUP,
    RanksLost,
    Seat,
    is_loss,
    join,
    leave,
    ready_key,
    serve,
)
from rollwright.training.ranks.processes import RankProcesses
from rollwright.training.report import StepReport
from rollwright.training.rows import Row
from rollwright.training.settings import TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Floats, TokenIds

_log = logging.getLogger(__name__)
T = TypeVar("T")

START_SECONDS = 600.0
"""Seconds for the other ranks to load the base model, at least."""
NOTICE_SECONDS = 2.0
"""Seconds between a connection that closes and the end of the process behind it."""


class OtherRanks(Protocol):
    """The processes of ranks 1, 2, …"""

    def lost(self, seconds: float = 0.0) -> str | None: ...

    def end(self, *, at_once: bool = False) -> None: ...


@dataclass(frozen=True)
class Setup:
    """What every rank builds its trainer from."""

    model: str
    """Folder or name of the base model."""
    settings: TrainerSettings
    total_updates: int = 1
    temperature: float = 1.0
    seed: int = 0

    def decided(self) -> "Setup":
        """With the data type that this machine chooses for `auto`: another machine's ranks might choose another one, and the
        parts of a gradient would differ in precision."""
        dtype = choose_dtype(self.settings.dtype)
        return replace(self, settings=self.settings.model_copy(update={"dtype": dtype}))

    def to_text(self) -> str:
        names = set(TrainerSettings.model_fields)
        plain = self.settings.model_dump(mode="json", include=names)
        return json.dumps({**vars(self), "settings": plain})


class _Crew:
    """Rank 0's trainer and the other ranks, from their start to their end."""

    def __init__(self, setup: Setup, start: Callable[[Seat], OtherRanks], host: str) -> None:
        size, seconds = setup.settings.processes, setup.settings.rank_timeout
        store = serve(host, size)
        store.set(SETUP, setup.to_text())
        seat = Seat(0, size, host, store.port, seconds)
        self.others = start(seat)
        try:
            model = load_model(setup.model)
            keys = [ready_key(rank) for rank in range(1, size)]
            if (reason := wait_for(store, keys, max(seconds, START_SECONDS), self.others.lost)) is not None:
                raise RanksLost(f"training: {reason}")
            join(store, seat)
            self.channel = Channel(store)
            self.trainer = Trainer(
                model,
                setup.settings,
                total_updates=setup.total_updates,
                temperature=setup.temperature,
                seed=setup.seed,
                ranks=Ranks(0, size),
            )
        except BaseException:
            self.end(at_once=True)
            raise

    def end(self, *, at_once: bool = False) -> None:
        self.others.end(at_once=at_once)
        leave()


class LeadingTrainer:
    """`Trainer` on several ranks."""

    def __init__(
        self,
        setup: Setup,
        start: Callable[[Seat], OtherRanks] = RankProcesses,
        host: str = LOOPBACK,
    ) -> None:
        """`start`: starts the other ranks. `host`: address of this machine for them."""
        self.settings = setup.settings
        self._setup, self._start, self._host = setup.decided(), start, host
        self._on_progress: Callable[[], None] = lambda: None
        self._checkpoint: Path | None = None
        """Last checkpoint; `None`: the base model."""
        self._since: list[bytes] = []
        """Rows of the steps since it."""
        self._restarts = 0
        self._crew: _Crew | None = None
        with self._watched():
            self._begin()

    def _begin(self) -> None:
        """Starts the ranks, with the weights of the base model."""
        self._crew = _Crew(self._setup, self._start, self._host)
        self._trainer = self._crew.trainer
        """Rank 0's own; its figures are read also when the ranks have ended."""
        self._trainer.on_progress = self._on_progress

    @property
    def version(self) -> int:
        return self._trainer.version

    @property
    def updates(self) -> int:
        return self._trainer.updates

    @property
    def skipped(self) -> Counter[str]:
        return self._trainer.skipped

    @property
    def ranks(self) -> Ranks:
        return self._trainer.ranks

    @property
    def others(self) -> OtherRanks:
        """The processes of the other ranks."""
        assert self._crew is not None
        return self._crew.others

    @property
    def on_progress(self) -> Callable[[], None]:
        return self._on_progress

    @on_progress.setter
    def on_progress(self, call: Callable[[], None]) -> None:
        self._on_progress = self._trainer.on_progress = call

    def step(self, rows: Sequence[Row]) -> StepReport:
        content = encode_rows(rows)
        report = self._call(lambda: self._made("step", content, lambda: self._trainer.step(rows)))
        self._since.append(content)
        self._restarts = 0
        return report

    def logprobs(self, sequences: Sequence[tuple[TokenIds, TokenIds]]) -> list[Floats]:
        content = msgspec.msgpack.encode([(list(prompt), list(sampled)) for prompt, sampled in sequences])
        return self._call(lambda: self._made("logprobs", content, lambda: self._trainer.logprobs(sequences)))

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        content = encode_rows(rows)
        return self._call(lambda: self._made("values", content, lambda: self._trainer.values(rows)))

    def weights(self) -> Weights:
        return self._call(lambda: self._made("weights", b"", lambda: self._trainer.weights()))

    def export(self, folder: Path) -> Weights:
        return self._call(lambda: self._made("weights", b"", lambda: self._trainer.export(folder)))

    def export_adapter(self, folder: Path) -> Weights:
        return self._call(lambda: self._made("adapter", b"", lambda: self._trainer.export_adapter(folder)))

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        shared = str(folder.absolute()).encode() if self._in_shards else b""
        self._call(lambda: self._made("save", shared, lambda: self._trainer.save(folder, extra)))
        self._checkpoint, self._since = folder, []

    def restore(self, folder: Path) -> dict[str, Any]:
        found = self._call(lambda: self._restore(folder))
        self._checkpoint, self._since = folder, []
        return found

    def interrupt(self) -> None:
        """Does nothing: a step ends by itself."""

    def close(self) -> None:
        """Ends the other ranks."""
        if self._crew is None:
            return
        try:
            self._crew.channel.send("stop")
        except RuntimeError as error:
            if not is_loss(error):
                raise
        self._crew.end()
        self._crew = None

    @property
    def _in_shards(self) -> bool:
        return self.settings.checkpoint_layout == "sharded"

    def _restore(self, folder: Path) -> dict[str, Any]:
        assert self._crew is not None
        manifest = read_manifest(folder)
        if manifest.sharded or self._in_shards:
            names = {
                "folder": str(folder.absolute()),
                "place": str(manifest.place.absolute()),
                "sharded": manifest.sharded,
                "state": dict(manifest.state),
                "sums": dict(manifest.sums),
            }
            self._crew.channel.send("restore_shards", msgspec.msgpack.encode(names))
            self._trainer.take_shards(folder, manifest)
            return dict(manifest.extra)
        checkpoint = self._trainer.read(folder)
        parameters, moments = checkpoint.tensors["model"], checkpoint.tensors["optimizer"]
        single = {entry: float(value) for entry, value in moments.items() if entry.startswith("step.")}
        names = {
            "parameters": list(parameters),
            "moments": list(moments),
            "single": single,
            "state": dict(checkpoint.state),
        }
        self._crew.channel.send("restore", msgspec.msgpack.encode(names))
        self._trainer.take(parameters, moments, checkpoint.state)
        return dict(checkpoint.extra)

    def _made(self, kind: str, content: bytes, call: Callable[[], T]) -> T:
        """Announces a call and makes it."""
        assert self._crew is not None
        self._crew.channel.send(kind, content)
        return call()

    def _call(self, call: Callable[[], T]) -> T:
        """Makes a call on all ranks; if some are lost, again on new ones."""
        while True:
            try:
                with self._watched():
                    return call()
            except RanksLost as lost:
                self._restart(lost)

    def _restart(self, lost: RanksLost) -> None:
        """Replaces all ranks and brings them to the state before the interrupted call."""
        while True:
            self._restarts += 1
            if self._crew is not None:
                self._crew.end(at_once=True)
                self._crew = None
            if self._restarts > self.settings.rank_restarts:
                raise RollwrightError(
                    f"{lost}; ranks were restarted {self.settings.rank_restarts} times without a finished step; "
                    "`rollwright resume` goes on from the last checkpoint, on any number of training.processes"
                ) from lost
            since = f"checkpoint {self._checkpoint.name}" if self._checkpoint else "the base model"
            _log.warning(
                "%s; new ranks start from %s and train %d steps again", lost, since, len(self._since)
            )
            try:
                with self._watched():
                    self._bring_back()
                return
            except RanksLost as again:
                lost = again

    def _bring_back(self) -> None:
        self._begin()
        if self._checkpoint is not None:
            self._restore(self._checkpoint)
        for content in self._since:
            rows = decode_rows(content)
            self._made("step", content, lambda rows=rows: self._trainer.step(rows))  # type: ignore[misc]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Turns an error of communication into one that says which rank was lost."""
        others = self._crew.others if self._crew is not None else None
        try:
            yield
        except RankFailed:
            raise RollwrightError(
                f"training: {(others and others.lost(NOTICE_SECONDS)) or 'another rank failed'}"
            ) from None
        except RuntimeError as error:
            if isinstance(error, RollwrightError) or not is_loss(error):
                raise
            others = self._crew.others if self._crew is not None else others
            reason = others.lost(NOTICE_SECONDS) if others is not None else None
            late = f"a rank did not answer within {self.settings.rank_timeout:g} s"
            raise RanksLost(f"training: {reason or late}") from error
