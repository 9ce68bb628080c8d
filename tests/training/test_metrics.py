"""Figures reach their files, and a run that goes on leaves no step twice."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollwright.errors import ConfigError
from rollwright.training.metrics import JsonLines, Metrics


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_line_is_there_when_write_returns(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "m.jsonl")
    writer.write(0, {"loss": 0.5, "skipped": "empty batch", "gap": float("nan")})
    line = (tmp_path / "m.jsonl").read_text(encoding="utf-8")
    assert json.loads(line) == {"step": 0, "loss": 0.5, "skipped": "empty batch", "gap": None}
    writer.close()


def test_resuming_keeps_the_steps_before_and_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3, "lo', encoding="utf-8")
    writer = JsonLines(file, resume_at=2)
    writer.write(2, {"loss": 1.0})
    writer.close()
    assert steps(file) == [0, 1, 2]


def test_a_run_that_begins_anew_begins_its_file_anew(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"step": 0}\n', encoding="utf-8")
    JsonLines(file).close()
    assert file.read_text(encoding="utf-8") == ""


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, ["jsonl", "tensorboard"])
    metrics.write(3, {"loss": 0.25, "staleness/0": 7, "skipped": "no advantage"})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(3, 0.25)]
    assert set(events.Tags()["scalars"]) == {"loss", "staleness/0"}
    assert steps(tmp_path / "metrics.jsonl") == [3]


def test_wandb_gets_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package needs an account; its two calls stand in for it."""
    logged: list[tuple[int, dict[str, object]]] = []

    class Run:
        def log(self, figures: dict[str, object], step: int) -> None:
            logged.append((step, figures))

        def finish(self) -> None:
            logged.append((-1, {}))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: Run()))
    metrics = Metrics(tmp_path, ["wandb"])
    metrics.write(2, {"loss": 0.25})
    metrics.close()
    assert logged == [(2, {"loss": 0.25}), (-1, {})]


def test_a_writer_that_is_unknown_or_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown `tensorbord` .did you mean `tensorboard`.*; known: jsonl, tensorboard, wandb",
    ):
        Metrics(tmp_path, ["tensorbord"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="metrics wandb: needs the package wandb"):
        Metrics(tmp_path, ["wandb"])
