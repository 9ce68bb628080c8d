"""Evaluations are runs with a report: the same twice, resumed, cached, stopped early, and honest about failures."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollwright as rw
from rollwright.evaluation.comparison import compare_reports, verdict
from rollwright.run.evaluating import REPORT_HTML, REPORT_JSON, REPORT_MARKDOWN, load_report

REPORTS = (REPORT_JSON, REPORT_MARKDOWN, REPORT_HTML)
FAST = {"kind": "simulated", "tokens_per_second": 1e6}


def evaluated(runs: Path, *overrides: str, **given: Any) -> rw.Evaluation:
    settings = {"policy": FAST, "tags": ["FrozenLake"], "episodes": 12, "samples": 3, **given}
    return rw.evaluate(None, *overrides, runs=runs, **settings)


def files(found: rw.Evaluation) -> list[bytes]:
    assert found.folder is not None
    return [(found.folder / name).read_bytes() for name in REPORTS]


def rows_of(tmp_path: Path, count: int) -> dict[str, Any]:
    """A configuration with tasks whose answers the simulated engine knows."""
    lines = [
        json.dumps(
            {"question": f"{number}?", "answer": str(number), "kind": "even" if number % 2 == 0 else "odd"}
        )
        for number in range(count)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    reward = {"kind": "exact_match", "extract": r"(\S+)\s*$"}
    return {"folder": str(tmp_path), "custom_envs": {"Rows": {"tasks": "rows.jsonl", "rewards": [reward]}}}


def test_the_same_evaluation_twice_gives_the_same_report_to_the_byte(tmp_path: Path) -> None:
    first = evaluated(tmp_path / "a")
    played_again = evaluated(tmp_path / "b")
    from_cache = evaluated(tmp_path / "a")
    assert files(first) == files(played_again) == files(from_cache)
    assert from_cache.folder != first.folder
    assert first.report["state"] == "complete"
    assert first.report["overall"]["episodes"] == 36
    assert set(first.report["overall"]["pass@k"]) == {"1", "2", "3"}


def test_an_episode_that_was_played_before_is_taken_from_the_cache_and_costs_nothing(tmp_path: Path) -> None:
    first = evaluated(tmp_path, episodes=6)
    more = evaluated(tmp_path, episodes=10)
    assert spent(first) > 0
    assert spent(more) == sum(tokens(each) for each in more.trajectories[18:])
    for changed in ("seed=7", "evaluation.temperature=0.5", "policy.skill=0.2"):
        assert spent(evaluated(tmp_path, changed, episodes=6)) > 0
    assert spent(evaluated(tmp_path, "max_inflight=3", episodes=6)) == 0


def spent(found: rw.Evaluation) -> int:
    assert found.folder is not None
    summary = json.loads((found.folder / "summary.json").read_text())
    total = summary["costs"]["total"]
    return int(total["prompt"] + total["completion"])


def tokens(trajectory: rw.Trajectory) -> int:
    return sum(turn.prompt_tokens + turn.completion_tokens for turn in trajectory.turns)


def test_failures_are_apart_from_zeros(tmp_path: Path) -> None:
    broken = {**FAST, "failure_rate": 0.4, "skill": 1.0}
    found = evaluated(tmp_path, "limits.max_attempts=1", policy=broken, episodes=20)
    report = found.report
    assert report["episodes"]["failed"] > 0
    assert report["episodes"]["finished"] + report["episodes"]["failed"] == 60
    assert report["overall"]["success"]["value"] == 1.0
    assert report["failures"][0]["count"] <= report["episodes"]["failed"]
    assert report["tasks"]["with_result"] + report["tasks"]["without_result"] == 20


def test_an_evaluation_stops_at_the_first_narrow_interval_and_plays_no_task_behind_it(tmp_path: Path) -> None:
    found = evaluated(
        tmp_path, "evaluation.half_width=0.1", policy={**FAST, "skill": 1.0}, episodes=200, samples=2
    )
    report = found.report
    assert report["state"] == "stopped early"
    assert report["tasks"]["played"] in report["plan"]["looks"]
    assert report["tasks"]["played"] < 200
    score = report["overall"]["score"]
    assert (score["high"] - score["low"]) / 2 <= 0.1


def test_results_are_broken_down_by_the_fields_of_the_rows_and_votes_are_counted(tmp_path: Path) -> None:
    found = rw.evaluate(
        rows_of(tmp_path, 30), policy={**FAST, "skill": 0.9}, tags=["Rows"], samples=4, temperature=1.0
    )
    report = found.report
    assert set(report["by"]) == {"kind"}
    assert {value: each["tasks"] for value, each in report["by"]["kind"].items()} == {"even": 15, "odd": 15}
    assert report["overall"]["majority@k"] is not None
    assert report["sampling"]["temperature"] == 1.0
    assert report["plan"]["tasks"] == 30


def test_two_models_are_compared_on_the_tasks_that_both_have(tmp_path: Path) -> None:
    weak = evaluated(tmp_path, policy={**FAST, "skill": 0.2}, episodes=40)
    strong = evaluated(tmp_path, policy={**FAST, "skill": 0.95}, episodes=30)
    assert weak.folder is not None
    found = compare_reports(load_report(weak.folder), strong.report, ("weak", "strong"))
    assert found["tasks"] == {"shared": 30, "only_first": 10, "only_second": 0}
    assert found["overall"]["p_value"] < 0.01
    assert found["overall"]["difference"] > 0.2
    assert "they differ on 30 shared tasks" in verdict(found)
    other = evaluated(tmp_path, tags=["SimpleSokoban"])
    with pytest.raises(rw.RollwrightError, match="share no task"):
        compare_reports(weak.report, other.report)


KILLER = """
import os, signal
from rollwright.engines.settings import SimulatedPolicyConfig
from rollwright.simulation.engine import make_simulated


class Killer:
    \"\"\"The simulated engine, which kills its process in the middle of a generation.\"\"\"

    def __init__(self):
        self._engine = make_simulated(SimulatedPolicyConfig(tokens_per_second=1e5))
        self._left = int(os.environ.get("KILL_AFTER", 10**9))

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, prompt, sampling):
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return await self._engine.generate(prompt, sampling)
"""


def test_an_evaluation_that_is_killed_again_and_again_reports_what_an_undisturbed_one_does(
    tmp_path: Path,
) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    settings = [
        "policy.kind=killer:Killer",
        "evaluation.tags=[FrozenLake]",
        "evaluation.tasks=10",
        "evaluation.samples=4",
    ]

    # A killed process holds its rollouts for the length of a lease, and each kill is an attempt at them.
    settings += ["limits.lease_seconds=1", "limits.heartbeat_interval=0.3", "limits.max_attempts=9"]

    def run(*arguments: str, kill_after: int | None = None) -> int:
        environment = {**os.environ, **({} if kill_after is None else {"KILL_AFTER": str(kill_after)})}
        command = [sys.executable, "-m", "rollwright", *arguments, "--no-live"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode

    assert run("eval", *settings, "--fresh") == 0
    assert run("eval", *settings, "--fresh", kill_after=11) == -signal.SIGKILL
    for generations in (7, 40):
        assert run("resume", "runs/evaluation-2", kill_after=generations) == -signal.SIGKILL
    assert run("resume", "runs/evaluation-2") == 0
    for name in REPORTS:
        whole, resumed = (tmp_path / "runs" / each / name for each in ("evaluation", "evaluation-2"))
        assert whole.read_bytes() == resumed.read_bytes(), name


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["evaluation.temperature=0"], "3 samples at temperature 0 would be the same episode"),
        (["evaluation.k=[8]"], "k: 8 is more than samples"),
        (["evaluation.tasks=[1,2]"], "2 numbers for 1 tags"),
        (["budget.usd=1"], "budget.usd: the price of 'simulated' is not known"),
    ],
)
def test_a_mistake_is_one_line(overrides: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(rw.ConfigError) as raised:
        evaluated(tmp_path, *overrides)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())
