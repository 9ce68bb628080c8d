"""Who answers for which agent, who is trained, and what each agent's turns are compared with."""

import math
from dataclasses import replace
from typing import Any

import pytest

from rollwright.engines.base import EngineError, Generation, UpdateMode, Weights
from rollwright.simulation.engine import SimulatedEngine
from rollwright.teams import FROZEN, Performance, SamplingChanges, TeamPolicies, math_team, only_agents
from rollwright.training.advantages import AgentWise
from rollwright.training.rows import build_rows
from rollwright.trajectory import (
    Outcome,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
    floats,
    samples,
    token_ids,
)

APPROVE, REJECT = "<verify>approve</verify>", "<verify>reject</verify>"
LINES = {"math/solver": [r"\boxed{42}"], "math/verifier": [REJECT]}


def frozen_verifier(**changes: Any) -> Any:
    team = math_team(max_loops=2)
    verifier = replace(team.agents["verifier"], trainable=False, **changes)
    return replace(team, agents={**team.agents, "verifier": verifier})


def test_agents_can_have_engines_of_their_own(stage: Any) -> None:
    solver, verifier = stage.Script(LINES), stage.Script(LINES)
    policies = TeamPolicies(solver, {"math/verifier": verifier})
    stage.play(math_team(max_loops=2), policies)
    assert solver.asked == ["math/solver"] * 2
    assert verifier.asked == ["math/verifier"]


async def test_each_engine_is_closed_once_and_the_runs_own_alone_gets_new_weights(stage: Any) -> None:
    shared, own = stage.Script(LINES), SimulatedEngine()
    policies = TeamPolicies(own, {"math/verifier": shared, "math/solver": shared, "x/y": own})
    await policies.update_weights(Weights(3), UpdateMode.DRAIN)
    assert (policies.version, shared.version) == (3, 0)
    assert (await policies.probe()).engine == "simulated"
    await policies.close()
    assert shared.closed == 1


def test_agents_sample_in_their_own_way_and_greedily_in_validation(stage: Any) -> None:
    team = math_team()
    changes = SamplingChanges(temperature=0.3, max_tokens=77, stop=("!",))
    team = replace(
        team, agents={**team.agents, "verifier": replace(team.agents["verifier"], sampling=changes)}
    )
    policy = stage.Script(LINES)
    stage.play(team, policy)
    solver, verifier = policy.samplings[:2]
    assert (solver.temperature, solver.stop) == (1.0, ())
    assert (verifier.temperature, verifier.max_tokens, verifier.stop, verifier.top_p) == (
        0.3,
        77,
        ("!",),
        1.0,
    )
    policy = stage.Script(LINES)
    stage.play(team.greedy(), policy)
    assert {sampling.temperature for sampling in policy.samplings} == {0.0}


def test_a_frozen_agents_tokens_are_never_in_the_loss(stage: Any) -> None:
    trajectory = stage.play(frozen_verifier(), stage.Script(LINES))
    assert [turn.filtered for turn in trajectory.turns] == [None, FROZEN, None]
    masks = [any(sample.mask) for sample in samples(trajectory)]
    assert masks == [True, False, True]


def test_a_frozen_agent_may_be_an_engine_that_speaks_only_text(stage: Any) -> None:
    class TextOnly(stage.Script):  # type: ignore[misc]
        async def generate(self, prompt: Any, sampling: Any) -> Generation:
            made = await super().generate(prompt, sampling)
            return Generation(made.text, exact=False)

    judge = TextOnly(LINES)
    judge.renderer = None
    trajectory = stage.play(frozen_verifier(), TeamPolicies(stage.Script(LINES), {"math/verifier": judge}))
    assert trajectory.not_trainable is None
    assert len(build_rows([[trajectory]], AgentWise())) == 2


def test_a_frozen_engines_old_version_makes_no_episode_stale(stage: Any) -> None:
    trained, judge = stage.Script(LINES, version=9), stage.Script(LINES, version=0)
    policies = TeamPolicies(trained, {"math/verifier": judge})
    trajectory = stage.play(frozen_verifier(), policies, stage.Env(steps=2, right="never"), max_staleness=1)
    assert trajectory.stop is StopReason.TERMINATED
    assert trajectory.oldest_version == 9
    stale = stage.play(math_team(max_loops=2), policies, stage.Env(steps=2, right="never"), max_staleness=1)
    assert stale.stop is StopReason.STALE


# Credit


def call(number: int, agent: str, outcome: Outcome | None) -> Turn:
    ids = token_ids([number + 1])
    return Turn(
        id=number,
        after=number - 1 if number else None,
        extends=None,
        prompt_ids=token_ids([9]),
        sampled_ids=ids,
        logprobs=floats([-1.0]),
        versions=(VersionRun(0, 1),),
        agent=f"search/{agent}",
        outcome=outcome,
    )


def episode(name: str, agents: str, reward: float, penalties: dict[int, float] | None = None) -> Trajectory:
    last = len(agents) - 1
    turns = [
        call(
            place,
            agent,
            Outcome("", reward if place == last else 0.0, penalty=(penalties or {}).get(place, 0.0)),
        )
        for place, agent in enumerate(agents)
    ]
    return Trajectory(name, "1", "g", "Search", 0, turns=turns, stop=StopReason.TERMINATED)


def test_each_agent_is_compared_with_itself_over_all_its_calls_in_the_group() -> None:
    """Four episodes of a verifier V, a searcher Q and an answerer A; the figures are those of the definition."""
    group = [
        episode("1", "VQVA", 1.0),
        episode("2", "VA", 0.0),
        episode("3", "VQVQVA", 0.0),
        episode("4", "VA", 1.0),
    ]
    found = AgentWise()([group])[0]
    by_agent: dict[str, list[float]] = {"V": [1, 1, 0, 0, 0, 0, 1], "Q": [1, 0, 0], "A": [1, 0, 0, 1]}
    for agent, rewards in by_agent.items():
        mean = sum(rewards) / len(rewards)
        spread = math.sqrt(sum((each - mean) ** 2 for each in rewards) / (len(rewards) - 1)) + 1e-6
        got = [
            value
            for trajectory, values in zip(group, found, strict=True)
            for turn, value in zip(trajectory.turns, values, strict=True)
            if turn.agent == f"search/{agent}"
        ]
        assert got == pytest.approx([(each - mean) / spread for each in rewards])


def test_a_penalty_stands_on_the_guilty_call_alone_after_normalisation() -> None:
    clean = [episode("1", "VA", 1.0), episode("2", "VA", 0.0)]
    guilty = [episode("1", "VA", 1.0, {0: -0.01}), episode("2", "VA", 0.0)]
    before, after = AgentWise()([clean])[0], AgentWise()([guilty])[0]
    assert after[0][0] == pytest.approx(before[0][0] - 0.01)
    assert (after[0][1], after[1]) == (before[0][1], before[1])


def test_an_agent_that_was_called_once_in_its_group_gets_nothing() -> None:
    found = AgentWise()([[episode("1", "VQVA", 1.0), episode("2", "VA", 0.0)]])[0]
    assert found[0][1] == 0.0
    assert found[0][0] > 0 > found[1][0]


def test_the_same_rollout_twice_changes_no_statistics() -> None:
    group = [episode("1", "VA", 1.0), episode("2", "VA", 0.0), episode("3", "VA", 0.0)]
    once, twice = AgentWise()([group])[0], AgentWise()([[*group, group[0]]])[0]
    assert twice[:3] == once
    assert twice[3] == [0.0, 0.0]


def test_each_agents_turns_can_be_trained_apart_and_together_they_are_all(stage: Any) -> None:
    group = [episode("1", "VQVA", 1.0, {1: -0.5}), episode("2", "VA", 0.0)]
    whole = build_rows([group], AgentWise(), view="turns")
    parts = []
    for agent in "VQA":
        own = [only_agents(trajectory, {f"search/{agent}"}) for trajectory in group]
        parts += build_rows([own], AgentWise(), view="turns")
    key = lambda row: (row.rollout_id, row.token_ids.tolist(), row.advantages.tolist())  # noqa: E731
    assert sorted(map(key, parts)) == sorted(map(key, whole))
    assert len(parts) == 6


# Failures


def test_one_agents_exception_ends_its_own_sample_alone(stage: Any) -> None:
    import asyncio

    from rollwright.agents import EpisodeFailure
    from rollwright.aio import run_virtual

    broken = {"math/solver": [r"\boxed{42}"], "math/verifier": [EngineError("out of order")]}

    async def together() -> list[Any]:
        good, bad = stage.Script(LINES), stage.Script(broken)
        team = math_team(max_loops=2)
        return await asyncio.gather(
            *(stage.perform(team, bad if member == 1 else good, member=member) for member in range(3)),
            return_exceptions=True,
        )

    first, failed, last = run_virtual(together())
    assert isinstance(failed, EpisodeFailure)
    assert failed.record.boundary == "engine"
    assert first.stop is last.stop is StopReason.TERMINATED


@pytest.mark.parametrize("parallel", [True, False])
def test_one_agents_hang_ends_its_attempt_in_time_and_leaves_no_call_behind(
    stage: Any, parallel: bool
) -> None:
    from rollwright.agents import EpisodeFailure
    from rollwright.rollout.settings import LimitsConfig
    from rollwright.teams import Team

    async def panel(s: Any) -> Any:
        return (await s.gather("quick", "stuck"))[0]

    agents = {name: math_team().agents["solver"] for name in ("quick", "stuck")}
    team = Team("panel", agents, panel, Performance(enable_parallel_agents=parallel))
    policy = stage.Script({"panel/quick": ["42"], "panel/stuck": ["never"]}, {"panel/stuck": 1e5})
    with pytest.raises(EpisodeFailure, match="engine: timeout"):
        stage.play(team, policy, limits=LimitsConfig(generate_timeout=30.0, episode_timeout=1e4))
    assert policy.running == 0


class MemoryJournal:
    def __init__(self, recorded: Any = ()) -> None:
        self.recorded = {entry.place: entry for entry in recorded}
        self.entries = list(recorded)

    async def append(self, entry: Any) -> None:
        self.entries.append(entry)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_team_goes_on_from_its_journal_wherever_it_was_stopped(stage: Any, parallel: bool) -> None:
    """Agents that were asked together may be recorded in either order, and any number of them may be missing."""
    from rollwright.teams import Team

    async def panel(s: Any) -> Any:
        await s.gather("info", "planning")
        return await s.call("action")

    agents = {name: math_team().agents["solver"] for name in ("info", "planning", "action")}
    team = Team("panel", agents, panel, Performance(enable_parallel_agents=parallel))
    lines = {f"panel/{name}": [name] for name in agents}
    journal = MemoryJournal()
    slow_first = stage.Script(lines, {"panel/info": 5.0})
    whole = stage.play(team, slow_first, stage.Env(steps=3), journal=journal)
    assert len(journal.entries) == 9
    for kept in range(10):
        policy = stage.Script(lines)
        resumed = MemoryJournal(journal.entries[:kept])
        again = stage.play(team, policy, stage.Env(steps=3), journal=resumed)
        assert stage.trained(again) == stage.trained(whole)
        assert len(policy.asked) == 9 - kept
        assert not resumed.recorded
