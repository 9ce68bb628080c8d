"""Metric writers: JSON lines, TensorBoard and wandb. All receive the same flat metrics for each step."""

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

from rollwright.errors import ConfigError, naming
from rollwright.training.settings import METRIC_WRITERS

_log = logging.getLogger(__name__)

Figures = Mapping[str, float | str]
"""Metrics by name; `/` in a name separates its groups."""


class MetricWriter(Protocol):
    """Receives the metrics of each step. Constructed as `writer(folder, resume_at=…)`: the run's folder, and the next step
    of a resumed run, else `None`."""

    def write(self, step: int, figures: Figures) -> None: ...

    def forget(self, step: int) -> None:
        """Removes the metrics of steps before `step`, if they are in files of the run."""
        ...

    def close(self) -> None: ...


class JsonLines:
    """One line for each step, flushed when `write` returns. Numbers that are not finite are written as null."""

    def __init__(self, file: Path, *, resume_at: int | None = None) -> None:
        """`resume_at`: the next step; complete lines of earlier steps are kept. `None`: the file is overwritten."""
        kept = [] if resume_at is None or not file.exists() else _lines(file, range(resume_at))
        file.parent.mkdir(parents=True, exist_ok=True)
        self._path = file
        self._file = self._begin_with(kept)

    def write(self, step: int, figures: Figures) -> None:
        finite = {name: None if _not_finite(value) else value for name, value in figures.items()}
        with naming(self._path):
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()

    def forget(self, step: int) -> None:
        kept = _lines(self._path, range(step, sys.maxsize))
        self._file.close()
        self._file = self._begin_with(kept)

    def close(self) -> None:
        self._file.close()

    def _begin_with(self, lines: Sequence[str]) -> TextIO:
        """Replaces the content of the file with these lines, and opens it for appending."""
        partial = self._path.with_name(f".{self._path.name}.partial")
        with naming(partial):
            partial.write_text("".join(lines), encoding="utf-8")
        partial.replace(self._path)
        return self._path.open("a", encoding="utf-8")


class TensorBoard:
    """Event files for TensorBoard, without text values."""

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("needs the package tensorboard") from error
        # TensorBoard ignores events from `purge_step` on that an earlier process wrote.
        self._writer: Any = SummaryWriter(str(folder), purge_step=resume_at)

    def write(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def forget(self, step: int) -> None:
        """Keeps everything: event files cannot be edited."""

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, configured by its environment variables."""

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise ConfigError("needs the package wandb") from error
        self._run: Any = wandb.init(dir=str(folder), resume="never" if resume_at is None else "allow")

    def write(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step)

    def forget(self, step: int) -> None:
        """Keeps everything: logged steps cannot be removed."""

    def close(self) -> None:
        self._run.finish()


def open_jsonl(folder: Path, resume_at: int | None = None) -> JsonLines:
    return JsonLines(folder / "metrics.jsonl", resume_at=resume_at)


def open_tensorboard(folder: Path, resume_at: int | None = None) -> TensorBoard:
    return TensorBoard(folder / "tensorboard", resume_at=resume_at)


class Metrics:
    """Passes metrics to all configured writers."""

    def __init__(
        self, folder: Path, names: Sequence[str] = ("jsonl",), *, resume_at: int | None = None
    ) -> None:
        for name in names:
            METRIC_WRITERS.find(name)  # an unknown name fails before any writer has created a file
        self._writers: list[tuple[str, MetricWriter]] = [
            (name, METRIC_WRITERS.make(name, folder, resume_at=resume_at)) for name in names
        ]

    def write(self, step: int, figures: Figures) -> None:
        for name, writer in self._writers:
            with METRIC_WRITERS.blame(name):
                writer.write(step, figures)

    def forget(self, step: int) -> None:
        """Removes the metrics of steps before `step`, where a writer can."""
        for name, writer in self._writers:
            with METRIC_WRITERS.blame(name):
                writer.forget(step)

    def close(self) -> None:
        for name, writer in self._writers:
            with METRIC_WRITERS.blame(name):
                writer.close()


def _lines(file: Path, steps: range) -> list[str]:
    """The lines of these steps, without a partial last line after a crash; unreadable lines are skipped with a warning."""
    kept = []
    content = file.read_bytes().decode("utf-8", errors="replace")
    for number, line in enumerate(content.split("\n")[:-1], 1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            _log.warning("%s: line %d cannot be read and is left out", file, number)
            continue
        if step in steps:
            kept.append(line + "\n")
    return kept


def _not_finite(value: float | str) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
