"""Budgets stop a run before it spends more, and the ledger of costs is exact through failures, workers and resumes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import RunConfig, build
from rollwright.engines.settings import PriceConfig
from rollwright.errors import ConfigError
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.run.costs import BudgetReached, CostBook, price_of
from rollwright.run.evaluating import evaluate_run, settle_evaluation
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.playing import play_run
from rollwright.run.training_job import train_run
from rollwright.trajectory import OutsideCall, StopReason, TokenUsage, Trajectory, Turn

PRICES = {"simulated": {"prompt": 1.0, "completion": 4.0}}


def config_of(**settings: Any) -> RunConfig:
    return build(
        {
            "name": "spender",
            "max_steps": 6,
            "policy": {"kind": "simulated", "tokens_per_second": 1e6},
            "prices": PRICES,
            "train_env_manager": {"num_env_groups": 4, "group_size": 4, "tags": ["FrozenLake"]},
            **settings,
        }
    )


def played(
    path: Path, config: RunConfig, *, resume: bool = False, workers: int | None = None
) -> dict[str, Any]:
    folder = RunFolder.reopen(path) if resume else RunFolder.begin(path, config)
    return asyncio.run(play_run(config, folder, resume=resume, workers=workers))


def tokens_of(path: Path) -> int:
    return sum(
        turn.prompt_tokens + turn.completion_tokens
        for each in RunReader(path).trajectories()
        for turn in each.turns
    )


def total(summary: dict[str, Any]) -> int:
    found = summary["costs"]["total"]
    return int(found["prompt"] + found["completion"])


def test_a_run_stops_within_its_budget_and_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    path = tmp_path / "spender"
    first = played(path, config_of(budget={"tokens": 150_000}))
    assert first["interrupted"]
    assert "150,000 tokens" in first["stopped"]
    assert total(first) == tokens_of(path)
    assert 50_000 < total(first) <= 150_000
    second = played(path, config_of(budget={"tokens": 220_000}), resume=True)
    assert second["stopped"] is not None
    assert total(first) <= total(second) == tokens_of(path) <= 220_000
    last = played(path, config_of(), resume=True)
    assert not last["interrupted"]
    assert last["stopped"] is None
    assert total(last) == tokens_of(path)
    assert last["ledger"]["delivered"] == 96


def test_what_worker_processes_spend_is_counted_exactly(tmp_path: Path) -> None:
    path = tmp_path / "spender"
    summary = played(path, config_of(budget={"usd": 0.2}), workers=2)
    assert "of $0.20" in summary["stopped"]
    assert total(summary) == tokens_of(path)
    spent = summary["costs"]["total"]
    assert spent["usd"] == pytest.approx((spent["prompt"] + 4 * spent["completion"]) / 1e6, abs=1e-12)
    amounts = [(each[5] + 4 * each[7]) / 1e6 for row in RunReader(path).costs() for each in row["used"]]
    until = next((n for n in range(len(amounts)) if sum(amounts[: n + 1]) >= 0.2), len(amounts))
    assert len(amounts) - until <= 16  # no more than were in flight when it was reached


def test_a_budget_smaller_than_one_episode_is_exceeded_by_what_was_in_flight_only(tmp_path: Path) -> None:
    summary = played(tmp_path / "spender", config_of(budget={"tokens": 10}))
    assert summary["stopped"] is not None
    assert summary["ledger"]["opened"] <= 16
    assert total(summary) == tokens_of(tmp_path / "spender")


def test_turns_of_failed_episodes_are_paid_for_all_the_same(tmp_path: Path) -> None:
    settings = {
        "policy": {"kind": "simulated", "tokens_per_second": 1e6, "failure_rate": 0.15, "skill": 0.2},
        "limits": {"max_attempts": 1, "max_refills": 1000},
        "max_steps": 2,
    }
    path = tmp_path / "spender"
    summary = played(path, config_of(**settings))
    assert summary["ledger"]["failed"] > 0
    assert total(summary) > tokens_of(path)
    rows = RunReader(path).costs()
    assert len({row["rollout_id"] for row in rows}) == len(rows)
    assert all(row["tag"] == "FrozenLake" for row in rows)
    # Every turn that the engine answered is in the ledger, also of failed episodes; one that is cancelled may have one more
    # in flight.
    turns, cancelled = summary["activity"]["turns"], summary["ledger"]["cancelled"]
    assert turns - cancelled <= summary["costs"]["total"]["calls"] <= turns


def test_lines_of_costs_that_a_crash_lost_are_counted_from_the_log(tmp_path: Path) -> None:
    path = tmp_path / "spender"
    config = config_of(budget={"tokens": 150_000})
    first = played(path, config)
    lines = (path / "costs.jsonl").read_text().splitlines(keepends=True)
    (path / "costs.jsonl").write_text("".join(lines[:5]))
    assert total(played(path, config, resume=True)) == total(first)


def book(clock: list[float], **budget: float) -> CostBook:
    running = [0]
    made = CostBook(config_of(budget=budget), running=lambda: running[0], clock=lambda: clock[0])
    made.__dict__["in_flight"] = running
    return made


def episode(number: int, prompt: int = 900, completion: int = 100, seconds: float = 60.0) -> Trajectory:
    turn = Turn(id=0, after=None, extends=None, prompt_tokens=prompt, completion_tokens=completion)
    found = Trajectory(f"r{number}", "a", "g", "FrozenLake", 0, turns=[turn], stop=StopReason.TERMINATED)
    found.duration = seconds
    return found


def test_no_group_is_opened_that_would_not_fit_beside_those_in_flight() -> None:
    made = book([0.0], tokens=22_000)
    for number in range(16):
        made.add(f"r{number}", episode(number))
    assert made.admits(6)
    assert not made.admits(7)
    made.__dict__["in_flight"][0] = 4
    assert made.admits(2)
    assert not made.admits(3)
    assert made.refusal(3) is None
    made.__dict__["in_flight"][0] = 0
    assert isinstance(made.refusal(7), BudgetReached)


def test_hours_are_those_of_playing_and_leave_room_for_an_episode() -> None:
    clock = [0.0]
    made = book(clock, hours=1.0)
    for number in range(16):
        made.add(f"r{number}", episode(number))
    clock[0] = 3500.0
    assert made.admits(4)
    clock[0] = 3550.0
    assert not made.admits(4)
    assert "0.99 of 1 hours" in made.status()


def test_a_rollout_counts_once_and_one_that_was_known_counts_nothing() -> None:
    made = book([0.0], tokens=10_000)
    made.add("r0", episode(0))
    made.add("r0", episode(0))
    made.add_free("r1")
    made.add("r1", episode(1))
    assert made.ledger.total == TokenUsage(1, 900, 0, 100, 0)


def test_cached_and_reasoning_tokens_have_prices_of_their_own() -> None:
    price = PriceConfig(prompt=2, cached=0.5, completion=8, reasoning=4, call=0.001)
    usage = TokenUsage(calls=2, prompt=1000, cached=400, completion=500, reasoning=200)
    assert price_of(usage, price) == pytest.approx(0.002 + (600 * 2 + 400 * 0.5 + 300 * 8 + 200 * 4) / 1e6)
    plain = PriceConfig(prompt=2, completion=8)
    assert price_of(usage, plain) == pytest.approx((1000 * 2 + 500 * 8) / 1e6)


def test_judges_have_entries_of_their_own() -> None:
    made = book([0.0], tokens=100_000)
    judged = episode(0)
    judged.judged = (
        OutsideCall("style", "judge-model", TokenUsage(1, 50, 0, 5, 0)),
        OutsideCall("facts", "", TokenUsage(1, 7)),
    )
    made.add("r0", judged)
    sums = made.ledger.sums({"judge-model": PriceConfig(prompt=10), "simulated": PriceConfig(prompt=1)})
    assert sums["by"]["judge"]["style"]["prompt"] == 50
    assert sums["by"]["judge"]["facts"]["usd"] == pytest.approx(7e-6)
    assert sums["by"]["model"]["judge-model"]["usd"] == pytest.approx(5e-4)
    assert json.dumps(sums)


def test_a_budget_in_dollars_needs_a_price_for_every_model() -> None:
    with pytest.raises(ConfigError, match=r"prices\.simulated"):
        CostBook(config_of(budget={"usd": 1.0}, prices={}))
    with pytest.raises(ConfigError, match="budget: is empty"):
        config_of(budget={})


def overspent(path: Path, limit: float, inflight: int) -> bool:
    """Whether more rollouts ended after the budget was reached than were in flight then."""
    amounts = [each[5] + each[7] for row in RunReader(path).costs() for each in row["used"]]
    until = next((n for n in range(len(amounts)) if sum(amounts[: n + 1]) >= limit), len(amounts))
    return len(amounts) - 1 - until > inflight


def evaluation_of(**settings: Any) -> RunConfig:
    return settle_evaluation(
        build(
            {
                "name": "spender",
                "policy": {"kind": "simulated", "tokens_per_second": 1e6},
                "evaluation": {"tags": ["FrozenLake"], "tasks": 60, "samples": 4, "cache": False},
                **settings,
            }
        )
    )


def evaluated(
    path: Path, config: RunConfig, *, resume: bool = False, **how: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = RunFolder.reopen(path) if resume else RunFolder.begin(path, config)
    return asyncio.run(evaluate_run(config, folder, resume=resume, **how))


@pytest.mark.parametrize("how", [{}, {"workers": 2}, pytest.param({"ray": "local", "workers": 1}, id="ray")])
def test_an_evaluation_stops_at_its_budget_in_every_kind_of_worker_and_ends_with_the_same_report(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    if "ray" in how:
        pytest.importorskip("ray", reason="needs rollwright[ray]")
    whole = evaluated(tmp_path / "whole", evaluation_of())[1]
    path = tmp_path / "spender"
    limit = 300_000
    summary, report = evaluated(path, evaluation_of(max_inflight=8, budget={"tokens": limit}), **how)
    assert f"{limit:,} tokens" in summary["stopped"]
    assert report["state"] == "incomplete"
    assert total(summary) == tokens_of(path)
    assert total(summary) <= limit or not overspent(path, limit, 8 + 4)
    ended, last = evaluated(path, evaluation_of(max_inflight=8), resume=True, **how)
    assert ended["stopped"] is None
    assert total(ended) == tokens_of(path)
    assert last == whole


def test_costs_that_grow_on_the_way_are_exceeded_by_what_is_being_played_only(tmp_path: Path) -> None:
    """The first episodes promise little; what waits in the queue when the budget is reached is not played."""
    (tmp_path / "growing.py").write_text(GROWING)
    config = evaluation_of(
        folder=str(tmp_path), policy={"kind": "growing:Growing"}, max_inflight=6, budget={"tokens": 150_000}
    )
    path = tmp_path / "spender"
    summary, _ = evaluated(path, config)
    assert summary["stopped"] is not None
    assert not overspent(path, 150_000, 6 + 4)
    assert RunReader(path).costs()


GROWING = """
from rollwright.engines.base import Generation


class Growing:
    \"\"\"Answers that become longer and longer.\"\"\"

    renderer = None
    version = 0
    pressure = 0

    def __init__(self):
        self._calls = 0

    async def generate(self, prompt, sampling):
        self._calls += 1
        return Generation("up", exact=False, prompt_tokens=10, completion_tokens=self._calls)

    async def close(self):
        pass
"""


def test_a_training_stops_at_its_budget_and_goes_on_with_the_same_episodes(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(["Which way do you go? left right up down"], vocabulary_size=270)
    tiny_llama(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=1024).save_pretrained(
        tmp_path / "m"
    )
    tokenizer.save_pretrained(tmp_path / "m")

    def trained(name: str, *, resume: bool = False, **more: Any) -> dict[str, Any]:
        config = build(
            {
                "name": "spender",
                "max_steps": 4,
                "sequence_length": 1000,
                "policy": {
                    "kind": "torch",
                    "model": str(tmp_path / "m"),
                    "renderer": "template",
                    "device": "cpu",
                },
                "custom_envs": {"Lake": {"env_type": "FrozenLake", "max_tokens_per_step": 4, "max_steps": 2}},
                "train_env_manager": {"num_env_groups": 4, "group_size": 4, "tags": ["Lake"]},
                "training": {"checkpoint_steps": 2},
                **more,
            }
        )
        path = tmp_path / name
        folder = RunFolder.reopen(path) if resume else RunFolder.begin(path, config)
        return asyncio.run(train_run(config, folder, resume=resume))

    whole = trained("whole")
    limit = total(whole) // 2
    first = trained("spender", budget={"tokens": limit})
    assert f"{limit:,} tokens" in first["stopped"]
    assert 0 < total(first) <= limit
    assert 0 < first["training"]["steps"] < 4
    again = trained("spender", resume=True, budget={"tokens": limit})  # nothing fits any more
    assert total(again) == total(first)
    last = trained("spender", resume=True)
    assert last["stopped"] is None
    assert total(last) == total(whole)
    assert last["training"]["steps"] == 4
    assert tokens_of(tmp_path / "spender") == tokens_of(tmp_path / "whole")
