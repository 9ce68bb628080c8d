"""Whatever is killed, whenever: nothing is lost, nothing counts twice, no recorded token is paid twice, nothing is silent.

A short version; `make soak` kills a thousand times.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    before = set(sys.modules)
    import soak_round

    import soak

    yield soak, soak_round
    for name in set(sys.modules) - before:
        if name.startswith("soak"):
            del sys.modules[name]


@pytest.mark.parametrize(("setup", "seed"), [("alone", 5), ("served", 6)])
def test_a_run_whose_parts_are_killed_at_random_ends_with_everything_once(
    harness: Any, tmp_path: Path, setup: str, seed: int
) -> None:
    _, soak_round = harness
    result = soak_round.Round(tmp_path / "round", 0, seed, setup).play(4, (0.2, 0.8))
    assert result.kills.total() > 0, "it was over before anything could be killed"
    assert result.answers > 0
    assert result.findings.rows() == {"lost": [], "double": [], "paid twice": [], "silent": []}


@pytest.mark.soak
def test_a_thousand_kills_cost_nothing_but_what_was_in_flight(harness: Any, tmp_path: Path) -> None:
    soak, _ = harness
    findings = soak.soak(1000, 1, tmp_path, None)
    assert findings.rows() == {"lost": [], "double": [], "paid twice": [], "silent": []}
