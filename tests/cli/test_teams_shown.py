"""What a team did is shown: who spoke in each turn and what it was asked, what was thrown away and what was cut."""

import asyncio
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollwright.cli.show import find
from rollwright.cli.tables import ledger_table
from rollwright.cli.trajectory_view import render
from rollwright.config import build
from rollwright.observe.prompt_text import NOT_RECORDED, PromptReader
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.playing import play_run
from rollwright.trajectory import Message, Trajectory, token_ids

ENVS = {"Sums": "Sums", "Look": "Lookup"}
PERFORMANCE = {
    "enable_agent_skip": False,
    "enable_early_termination": False,
    "max_context_length": 60,
}


def play(folder: Path, tag: str, team: str, **more: Any) -> RunReader:
    content = {
        "name": team,
        "policy": {"kind": "simulated", "skill": more.pop("skill", 0.6), "tokens_per_second": 1_000_000},
        "agent": {"performance": more.pop("performance", PERFORMANCE)},
        "custom_envs": {
            tag: {"env_type": f"rollwright.teams.toy_envs:{ENVS[tag]}", "max_tokens_per_step": 512}
        },
        "orchestras": {tag: {"kind": team}},
        "train_env_manager": {"num_env_groups": 12, "group_size": 4, "tags": [tag]},
        **more,
    }
    run, config = RunFolder.create(folder, build(content))
    asyncio.run(play_run(config, run))
    return RunReader(run.path)


def shown(thing: Any) -> str:
    screen = Console(file=StringIO(), width=200)
    screen.print(thing)
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    return play(tmp_path_factory.mktemp("runs"), "Sums", "math")


def test_every_turn_names_its_agent_and_shows_that_agents_own_prompt(sums: RunReader) -> None:
    episode = next(each for each in sums.trajectories() if len(each.turns) > 2)
    text = shown(render(find(sums, episode.rollout_id), PromptReader(sums.config)))
    for turn in episode.turns:
        assert f"turn {turn.id + 1} · {turn.agent}" in text
        assert f"prompt of turn {turn.id + 1} · {turn.agent}" in text
    assert "You check solutions of mathematical problems." in text
    assert "You solve mathematical problems, step by step." in text


def test_without_prompts_agents_are_named_all_the_same(sums: RunReader) -> None:
    text = shown(render(next(iter(sums.trajectories()))))
    assert "turn 1 · math/solver" in text
    assert "prompt of" not in text


def test_a_prompt_that_was_never_ids_says_so(sums: RunReader) -> None:
    turn = next(iter(sums.trajectories())).turns[0]
    assert NOT_RECORDED in PromptReader(sums.config).text(type(turn)(0, None, None, prompt_ids=token_ids()))


def test_one_agent_in_one_conversation_is_shown_with_its_opening_messages() -> None:
    alone = Trajectory("r", "a", "g", "tag", 0, opening=(Message("system", "be good"),))
    assert "be good" in shown(render(alone, PromptReader(build({}))))


def test_calls_thrown_away_and_context_cut_are_in_metrics_summary_and_show(sums: RunReader) -> None:
    names = ["context_fragments_cut", "context_tokens_cut", "discarded_calls", "discarded_tokens"]
    episodes = list(sums.trajectories())
    expected = {name: sum(each.metrics.get(name, 0.0) for each in episodes) for name in names}
    assert all(expected.values())
    summary = sums.summary()
    assert summary is not None
    counters = summary["results"][0]["counters"]
    assert {name: counters[name] for name in names} == expected
    rows = [json.loads(line) for line in (sums.path / "metrics.jsonl").read_text().splitlines()]
    assert (
        sum(row["tags"]["Sums"]["counters"]["discarded_calls"] for row in rows) == expected["discarded_calls"]
    )
    told = shown(ledger_table(summary))
    assert all(name in told for name in names)
    one = next(each for each in episodes if each.metrics.get("discarded_calls"))
    assert f"discarded_calls {one.metrics['discarded_calls']:g}" in shown(render(one))


@pytest.mark.parametrize(("tag", "team"), [("Look", "search"), ("Look", "critic"), ("Sums", "math")])
def test_a_skilled_team_solves_its_practice_task_and_a_guess_does_not(
    tag: str, team: str, tmp_path: Path
) -> None:
    perfect = play(tmp_path, tag, team, skill=1.0, performance={})
    skilled = play(tmp_path, tag, team, skill=0.9, performance={})
    [first], [second] = ((each.summary() or {})["results"] for each in (perfect, skilled))
    assert first["success"] == 1.0
    assert second["success"] > second["random_success"]
    if tag == "Look":
        assert second["random_success"] < 0.3
