"""The verdict on learning is right about trainings whose truth is known: `bench/learning_verdicts.py` made them, with one thing
wrong or nothing, and kept their figures. Thresholds that no longer part them fail here."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
RUNS: dict[str, list[dict[str, Any]]] = json.loads(
    (BENCH / "results" / "learning_verdicts.json").read_text(encoding="utf-8")
)["runs"]


def judged(name: str, steps: Sequence[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    bench: Any = import_module("learning_verdicts")
    found: dict[str, Any] = bench.judged(bench.CASES[name.rpartition("/")[0]], list(steps))
    return found


@pytest.mark.parametrize("name", sorted(RUNS))
def test_what_is_wrong_is_named_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(name, RUNS[name], monkeypatch)
    assert not found["missed"], found["named"]
    assert not found["false"], found["named"]


def test_a_healthy_training_has_no_false_alarm_at_any_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = [name for name in RUNS if name.startswith("as it should be")]
    assert len(healthy) >= 3
    for name in healthy:
        assert judged(name, RUNS[name], monkeypatch)["verdicts_with_a_false_alarm"] == 0, name
