"""A trainer in another process, with the methods of `Trainer`: a step offers the batch and waits for its weights.

Always true: a step that the ledger knows is not offered again. So a run that is killed and resumed goes on behind the last
acknowledged batch, whatever its checkpoint says.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

from rollwright.engines.base import Weights
from rollwright.errors import ConfigError, FormatError, RollwrightError
from rollwright.models.loading import resolve, weights_checksum
from rollwright.training.checkpoints import Checkpoint, read_checkpoint, write_checkpoint, write_folder
from rollwright.training.report import Skip, StepReport, batch_figures, silent_share
from rollwright.training.rows import Row
from rollwright.training.service.ledger import Finish, ServedLedger
from rollwright.training.service.server import BatchServer
from rollwright.training.service.service import BatchService, copy_weights
from rollwright.training.service.wire import BatchRow
from rollwright.training.settings import ServeSettings
from rollwright.trajectory import Floats, TokenIds

LEDGER = "training/served.jsonl"
"""In the run's folder."""
ADDRESS = "training/served_at.txt"
"""In the run's folder: where batches are served."""
_REPORTED = ("loss", "grad_norm", "entropy", "learning_rate", "ratio", "clip_share")
"""Metrics of a trainer that are fields of a report; others are written beside them."""


class RemoteTrainer:
    """Offers batches over HTTP, from its making to `close`."""

    def __init__(self, model: str, settings: ServeSettings, run: Path, *, temperature: float = 1.0) -> None:
        """`model`: folder or name of the base model. `run`: the run's folder."""
        self._base = Path(resolve(model))
        self._ledger = ServedLedger(run / LEDGER)
        self.on_progress: Callable[[], None] = lambda: None
        self.version = 0
        self.updates = 0
        self.skipped: Counter[str] = Counter()
        self._step = 0
        """Steps that are in the weights."""
        self._weights = run / "weights"
        self._waiting: Future[Finish] | None = None
        self._stopped = False
        token = None if settings.token_env is None else os.environ.get(settings.token_env)
        if settings.token_env is not None and not token:
            raise ConfigError(f"training.serve.token_env: the variable {settings.token_env} is not set")
        self._server = BatchServer(
            lambda: BatchService(
                self._ledger,
                self._weights,
                self._base,
                lease_seconds=settings.lease_seconds,
                temperature=temperature,
            ),
            host=settings.host,
            port=settings.port,
            token=token,
        )
        self._server.start()
        (run / ADDRESS).write_text(self._server.url + "\n", encoding="utf-8")

    @property
    def url(self) -> str:
        """Where trainers ask for batches."""
        return self._server.url

    def step(self, rows: Sequence[Row]) -> StepReport:
        """Offers the batch and waits until a trainer has acknowledged it. Blocks."""
        began = time.perf_counter()
        finish = self._ledger.finished.get(self._step)
        if finish is None:
            batch = [BatchRow.of(row) for row in rows]
            if self._stopped:
                raise RollwrightError("training.serve: the run is ending")
            self._waiting = self._server.submit(self._server.service.train(self._step, batch))
            try:
                finish = self._waiting.result()
            except CancelledError:
                raise RollwrightError("training.serve: the run is ending") from None
            finally:
                self._waiting = None
        else:
            self._server.service.take_weights(finish)
        return self._count(finish, rows, time.perf_counter() - began)

    def _count(self, finish: Finish, rows: Sequence[Row], seconds: float) -> StepReport:
        self._step += 1
        skipped = None if finish.skipped is None else Skip.REMOTE
        self.version, self.updates = finish.version, self.updates + (skipped is None)
        if finish.skipped is not None:
            self.skipped[finish.skipped] += 1
        rollouts, reward, success = batch_figures(rows)
        reported: dict[str, Any] = {
            name: finish.metrics[name] for name in _REPORTED if name in finish.metrics
        }
        return StepReport(
            version=self.version,
            updates=int(skipped is None),
            skipped=skipped,
            reward=reward,
            success=success,
            rollouts=rollouts,
            rows=len(rows),
            silent_groups=silent_share(rows),
            tokens=sum(sum(row.mask) for row in rows),
            staleness=_ages(rows, self.version - (skipped is None)),
            seconds=seconds,
            more={name: value for name, value in finish.metrics.items() if name not in _REPORTED},
            **reported,
        )

    def interrupt(self) -> None:
        """Ends a step that waits, with an error; batches that are offered stay those of the record."""
        self._stopped = True
        if (waiting := self._waiting) is not None:
            waiting.cancel()

    def weights(self) -> Weights:
        folder = self._server.service.folder
        return Weights(version=self.version, folder=folder, checksum=weights_checksum(folder))

    def export(self, folder: Path) -> Weights:
        """Copies the current weights into a folder, unless they are there."""
        source = self._server.service.folder
        if source != folder:
            write_folder(folder, lambda place: copy_weights(source, place))
        return Weights(version=self.version, folder=folder, checksum=weights_checksum(folder))

    def export_adapter(self, folder: Path) -> Weights:
        raise ConfigError(
            "training.hand_over: a trainer elsewhere gives whole weights; accepted: auto, folder"
        )

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Saves how many batches are in the weights; weights and optimiser are the trainer's own."""
        state = {
            "remote": True,
            "step": self._step,
            "version": self.version,
            "updates": self.updates,
            "skipped": dict(self.skipped),
        }
        write_checkpoint(folder, Checkpoint({}, state, extra))

    def restore(self, folder: Path) -> dict[str, Any]:
        checkpoint = read_checkpoint(folder)
        state = checkpoint.state
        if not state.get("remote"):
            raise FormatError(
                f"checkpoint {folder}: is of a trainer in this process, and `training.serve` is set"
            )
        self._step, self.version, self.updates = state["step"], state["version"], state["updates"]
        self.skipped = Counter(state["skipped"])
        for step in range(self._step):
            self._server.service.take_weights(self._ledger.finished[step])
        return dict(checkpoint.extra)

    def logprobs(self, sequences: Sequence[tuple[TokenIds, TokenIds]]) -> list[Floats]:
        raise ConfigError("training.serve: a trainer elsewhere computes no log-probabilities for this run")

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        raise ConfigError("training.serve: a trainer elsewhere has its own critic, if any")

    def close(self) -> None:
        self._server.stop()
        self._ledger.close()


def _ages(rows: Sequence[Row], version: int) -> dict[int, int]:
    """Number of trained tokens by their age in versions."""
    found: Counter[int] = Counter()
    for row in rows:
        found.update(version - made for made, counts in zip(row.versions, row.mask, strict=True) if counts)
    return dict(found)
