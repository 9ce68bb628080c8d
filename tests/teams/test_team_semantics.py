"""What teams do, rule by rule: who is asked when, what becomes the action, and what is recorded of each call."""

from dataclasses import replace
from typing import Any

import pytest

from rollwright.agents import EpisodeFailure
from rollwright.errors import ConfigError
from rollwright.teams import (
    CriticLoop,
    Performance,
    Reply,
    Route,
    Situation,
    Team,
    TeamAgent,
    TeamSession,
    Verdict,
    VerdictRule,
    When,
    critic_team,
    math_team,
    search_team,
    sort_into_stages,
)
from rollwright.trajectory import FinishReason, full_prompt, samples, turn_samples

APPROVE, REJECT = "<verify>approve</verify>", "<verify>reject</verify>"
YES, NO = "<verify>yes</verify>", "<verify>no</verify>"
QUERY, ANSWER = "<think>t</think><search>q</search>", "<think>t</think><answer>42</answer>"


def says(text: str) -> TeamAgent:
    return TeamAgent(system=text, prompt="{question}{context}")


def math_lines(*verdicts: str) -> dict[str, list[str]]:
    return {
        "math/solver": [r"S1 \boxed{1}", r"S2 \boxed{2}", r"S3 \boxed{3}"],
        "math/verifier": list(verdicts),
    }


def search_lines(*verdicts: str) -> dict[str, list[str]]:
    return {"search/verifier": list(verdicts), "search/search": [QUERY], "search/answer": [ANSWER]}


# The math team


def test_an_approved_sample_makes_no_further_call(stage: Any) -> None:
    policy = stage.Script(math_lines(APPROVE))
    trajectory = stage.play(math_team(max_loops=5), policy)
    assert policy.asked == ["math/solver", "math/verifier"]
    assert stage.agents(trajectory) == ["solver", "verifier"]


def test_the_verifier_is_not_asked_in_the_last_round(stage: Any) -> None:
    policy = stage.Script(math_lines(REJECT))
    stage.play(math_team(max_loops=3), policy)
    assert policy.asked == ["math/solver", "math/verifier"] * 2 + ["math/solver"]


def test_the_action_is_the_last_solution_whole(stage: Any) -> None:
    env = stage.Env()
    stage.play(math_team(max_loops=3), stage.Script(math_lines(REJECT, APPROVE)), env)
    assert env.answers == [r"S2 \boxed{2}"]


def test_a_malformed_verdict_means_what_the_agent_declares_and_is_counted(stage: Any) -> None:
    team = math_team(max_loops=2)
    opened = stage.play(team, stage.Script(math_lines("well …")))
    assert stage.agents(opened) == ["solver", "verifier"]
    closed_rule = VerdictRule(malformed=Verdict.REJECT)
    closed = replace(
        team, agents={**team.agents, "verifier": replace(team.agents["verifier"], verdict=closed_rule)}
    )
    trajectory = stage.play(closed, stage.Script(math_lines("well …")))
    assert stage.agents(trajectory) == ["solver", "verifier", "solver"]
    assert trajectory.metrics["math/verifier.malformed_verdicts"] == 1


# The search team


def test_a_sample_that_is_judged_sufficient_is_answered_and_never_searched_for(stage: Any) -> None:
    policy, env = stage.Script(search_lines(YES)), stage.Env(steps=4)
    trajectory = stage.play(search_team(), policy, env)
    assert policy.asked == ["search/verifier", "search/answer"]
    assert env.answers == ["<answer>42</answer>"]
    assert trajectory.reward == 1.0


def test_searching_goes_on_until_enough_is_known(stage: Any) -> None:
    policy, env = stage.Script(search_lines(NO, NO, YES)), stage.Env(steps=4)
    stage.play(search_team(), policy, env)
    assert [each.partition("/")[2] for each in policy.asked] == ["verifier", "search"] * 2 + [
        "verifier",
        "answer",
    ]
    assert env.answers == ["<search>q</search>"] * 2 + ["<answer>42</answer>"]
    assert "Step 1: <search>q</search> SCENE 1" in policy.prompts[-1]
    assert "SCENE 2" in policy.prompts[-1]


def test_on_the_last_step_a_no_is_an_empty_action_and_only_the_verifier_is_trained(stage: Any) -> None:
    policy, env = stage.Script(search_lines(NO)), stage.Env(steps=2, penalty=-5.0)
    trajectory = stage.play(search_team(), policy, env)
    assert env.answers == ["<search>q</search>", ""]
    assert stage.agents(trajectory) == ["verifier", "search", "verifier"]
    assert trajectory.reward == 0.0
    assert trajectory.penalty == 0.0, "nobody wrote the empty action, so nobody pays for its format"


def test_the_answer_sees_only_the_environment_and_the_search_sees_the_verifier(stage: Any) -> None:
    policy = stage.Script(search_lines("BECAUSE " + NO, "ENOUGH " + YES))
    stage.play(search_team(), policy, stage.Env(steps=4))
    assert "BECAUSE" in policy.prompts[1]
    assert "ENOUGH" not in policy.prompts[3]


# The critic loop


def test_reflection_comes_from_the_second_step_on_and_once_in_a_step(stage: Any) -> None:
    approve, reject = "<critic>approve</critic>", "<critic>reject</critic>"
    lines = {"critic/reflect": ["HMM"], "critic/search": [QUERY], "critic/critic": [approve, reject, reject]}
    policy = stage.Script(lines)
    trajectory = stage.play(critic_team(), policy, stage.Env(steps=2))
    assert stage.agents(trajectory) == ["search", "critic", "reflect", "search", "critic", "search"]
    assert "HMM" in policy.prompts[3]


# What is recorded


def test_every_call_is_a_row_with_its_own_prompt_and_the_ids_that_were_sampled(stage: Any) -> None:
    policy = stage.Script(math_lines(REJECT))
    trajectory = stage.play(math_team(max_loops=2), policy)
    assert [turn.extends for turn in trajectory.turns] == [None] * 3
    assert [turn.after for turn in trajectory.turns] == [None, 0, 1]
    for turn, prompt in zip(trajectory.turns, policy.prompts, strict=True):
        assert policy.renderer.decode(full_prompt(trajectory.turns, turn.id)) == prompt
        assert policy.renderer.decode(turn.sampled_ids) == turn.text
    assert len(samples(trajectory)) == len(turn_samples(trajectory)) == 3
    assert all(
        sum(sample.mask) == len(turn.sampled_ids)
        for sample, turn in zip(samples(trajectory), trajectory.turns, strict=True)
    )


def test_rows_tokenised_are_rows_generated_are_rows_needed(stage: Any) -> None:
    for verdict, calls in ((APPROVE, 2), (REJECT, 5)):
        policy = stage.Script(math_lines(verdict))
        opened: list[Any] = []
        original = policy.renderer.open
        policy.renderer.open = lambda *args, log=opened, render=original: log.append(1) or render(*args)
        trajectory = stage.play(math_team(max_loops=3), policy)
        assert len(opened) == len(policy.asked) == len(trajectory.turns) == calls


def test_the_reward_stands_behind_all_calls_of_its_step_and_each_call_answers_its_own_observation(
    stage: Any,
) -> None:
    trajectory = stage.play(search_team(), stage.Script(search_lines(NO, YES)), stage.Env(steps=4))
    outcomes = [turn.outcome for turn in trajectory.turns]
    assert [each.observation for each in outcomes] == ["QUESTION", "SCENE 1", "SCENE 1", "SCENE 2"]
    assert [each.reward for each in outcomes] == [0.0, 0.0, 0.0, 1.0]
    assert trajectory.success is True


def test_an_invalid_call_is_penalised_itself_and_the_reward_knows_nothing_of_it(stage: Any) -> None:
    lines = {"math/solver": ["42, unboxed"], "math/verifier": [APPROVE]}
    trajectory = stage.play(math_team(), stage.Script(lines))
    solver, verifier = (turn.outcome for turn in trajectory.turns)
    assert (solver.penalty, solver.valid) == (-0.1, False)
    assert (verifier.penalty, verifier.valid, verifier.reward) == (0.0, True, 1.0)
    assert trajectory.reward == 1.0
    assert trajectory.metrics["math/solver.invalid_calls"] == 1


def test_what_the_environment_says_of_an_actions_form_stands_on_the_call_that_wrote_it(stage: Any) -> None:
    lines = {"math/solver": [r"WRONG FORMAT \boxed{42}"], "math/verifier": [APPROVE]}
    trajectory = stage.play(math_team(), stage.Script(lines), stage.Env(penalty=-0.25))
    solver, verifier = (turn.outcome for turn in trajectory.turns)
    assert (solver.penalty, solver.valid, solver.reward) == (-0.25, False, 0.0)
    assert (verifier.penalty, verifier.valid, verifier.reward) == (0.0, True, 1.0)


def test_an_agent_may_go_on_from_its_own_earlier_turn(stage: Any) -> None:
    team = math_team(max_loops=2)
    solver = replace(team.agents["solver"], again="{context}\nAgain.")
    team = replace(team, agents={**team.agents, "solver": solver})
    policy = stage.Script(math_lines("WRONG " + REJECT))
    trajectory = stage.play(team, policy)
    first, _, second = trajectory.turns
    assert second.extends == first.id
    added = policy.renderer.decode(second.prompt_ids)
    assert "WRONG" in added
    assert "S1" not in added, "its own answer stands in its own turn already"
    assert len(samples(trajectory)) == 2
    assert first.finish is FinishReason.STOP


def test_two_teams_can_use_the_same_agent_name(stage: Any) -> None:
    policy = stage.Script(math_lines(APPROVE) | search_lines(YES))
    math = stage.play(math_team(), policy)
    search = stage.play(search_team(), policy)
    assert {turn.agent for turn in math.turns} == {"math/solver", "math/verifier"}
    assert {turn.agent for turn in search.turns} == {"search/verifier", "search/answer"}


# Teams of one's own


async def panel(s: TeamSession) -> Reply:
    await s.gather("info", "planning")
    return await s.call("action")


def panel_team(**switches: Any) -> Team:
    agents = {name: says(name) for name in ("info", "planning", "action")}
    return Team("panel", agents, panel, Performance(**switches))


PANEL = {"panel/info": ["INFO"], "panel/planning": ["PLAN"], "panel/action": ["42"]}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("slow", ["panel/info", "panel/planning"])
def test_agents_asked_together_see_the_same_context_and_are_committed_in_declared_order(
    stage: Any, parallel: bool, slow: str
) -> None:
    policy = stage.Script(PANEL, {slow: 30.0})
    trajectory = stage.play(panel_team(enable_parallel_agents=parallel), policy)
    assert stage.agents(trajectory) == ["info", "planning", "action"]
    assert not any("output of" in prompt for prompt in policy.prompts[:2])
    assert policy.prompts[2].index("INFO") < policy.prompts[2].index("PLAN")


def test_a_flow_that_names_an_unknown_agent_is_refused(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"no agent 'critic'; there are: solver, verifier"):
        Team("t", math_team().agents, CriticLoop((("solver",),), "solver", "critic", 2))

    async def typo(s: TeamSession) -> Reply:
        return await s.call("slover")

    with pytest.raises(EpisodeFailure, match=r"agent: ConfigError: .*no agent 'slover'"):
        stage.play(Team("t", math_team().agents, typo), stage.Script({}))


def test_a_team_that_asks_nobody_is_an_error_of_its_own(stage: Any) -> None:
    async def idle(s: TeamSession) -> None:
        return None

    with pytest.raises(EpisodeFailure, match="asked no agent in step 1"):
        stage.play(Team("t", math_team().agents, idle), stage.Script({}))


def test_a_template_with_an_unknown_placeholder_is_one_clear_line() -> None:
    with pytest.raises(
        ConfigError, match=r"agents\.a\.prompt: 'qestion' cannot be filled in; known placeholders"
    ):
        Team("t", {"a": TeamAgent("", "{qestion}")}, Route("a", "a", "a"))


def test_stages_follow_from_who_needs_whom() -> None:
    depends = {"a": [], "d": ["b", "c"], "b": ["a"], "c": ["a"], "e": []}
    assert sort_into_stages(depends, "x") == (("a", "e"), ("b", "c"), ("d",))
    with pytest.raises(ConfigError, match="wait for each other"):
        sort_into_stages({"a": ["b"], "b": ["a"]}, "x")
    with pytest.raises(ConfigError, match="'z' is no agent of the loop"):
        sort_into_stages({"a": ["z"]}, "x")


def test_when_an_agent_takes_part() -> None:
    from rollwright.teams import Round

    reflect = When(from_step=2, first_round=True)
    assert [reflect.applies(step, Round(number, False)) for step in (1, 2) for number in (0, 1)] == [
        False,
        False,
        True,
        False,
    ]


def test_a_team_plays_one_step_for_code_of_ones_own(stage: Any) -> None:
    from rollwright.agents import Session
    from rollwright.aio import run_virtual
    from rollwright.engines.base import Sampling
    from rollwright.trajectory import Trajectory

    async def own() -> Trajectory:
        trajectory = Trajectory("r", "1", "g", "own", 0)
        policy = stage.Script(math_lines(APPROVE))
        session = Session(trajectory, policy, Sampling(), ("k",), sequence_length=9999, generate_timeout=99)
        action = await math_team().act(session, Situation("2 + 2?", "2 + 2?"))
        assert action.text == r"S1 \boxed{1}"
        assert action.author is not None
        return session.seal()

    assert stage.agents(run_virtual(own())) == ["solver", "verifier"]
