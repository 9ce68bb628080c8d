"""Agents of a team that call tools before they answer; D5, A6, A9."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rollwright.agents import EpisodeFailure, JournalEntry
from rollwright.agents.tool_agent import TOOL_CALLS, TOOL_PROBLEMS
from rollwright.aio import run_virtual
from rollwright.config import build
from rollwright.engines.rendering.bytes import written_call
from rollwright.errors import ConfigError
from rollwright.observe.profile import Profile
from rollwright.run.build_teams import build_run_policy, build_teams
from rollwright.run.run import Run
from rollwright.teams import Performance, Reply, Team, TeamAgent, TeamSession
from rollwright.teams.session import FROZEN, INVALID
from rollwright.tools import Pool, Toolbox, ToolContext, ToolFailure, tool
from rollwright.trajectory import Boundary, Phase, Trajectory, check


class Bench:
    """Tools that note what they did."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.pool: Pool[list[str]] = Pool(self._make, size=1)
        made, pool = self.made, self.pool

        @tool
        async def look(what: str, seconds: float = 1.0) -> str:
            made.append(what)
            await asyncio.sleep(seconds)
            return f"{what} is there"

        @tool
        async def write(word: str, context: ToolContext) -> str:
            page = await context.lease(pool)
            page.append(word)
            return " ".join(page)

        @tool(ends_episode=True)
        async def submit(answer: str) -> str:
            return answer

        @tool
        async def unplugged() -> None:
            raise ToolFailure("no power")

        self.box = Toolbox([look, write, submit, unplugged])

    async def _make(self, key: Any) -> list[str]:
        return []


async def alone(s: TeamSession) -> Reply:
    return await s.call("solver")


async def three(s: TeamSession) -> Reply:
    await s.gather("info", "plan")
    return await s.call("solver")


def agent(box: Toolbox | None = None, **more: Any) -> TeamAgent:
    return TeamAgent(system="", prompt="{question} {context}", toolbox=box, **more)


def team(flow: Any, performance: Performance | None = None, **agents: TeamAgent) -> Team:
    return Team("t", agents, flow, performance or Performance())


def look(what: str, seconds: float = 1.0) -> str:
    return written_call("look", {"what": what, "seconds": seconds})


def test_an_agent_calls_tools_is_told_their_results_and_answers(stage) -> None:
    bench = Bench()
    script = stage.Script({"t/solver": [f"Let me see.{look('cup')}{look('jug')}", "It is 42."]})
    env = stage.Env()
    played = stage.play(team(alone, solver=agent(bench.box)), script, env)
    assert (env.answers, sorted(bench.made)) == (["It is 42."], ["cup", "jug"])
    assert script.prompts[1].endswith("cup is therejug is there")
    first, second = played.turns
    assert (first.agent, second.agent, second.after, second.extends) == ("t/solver", "t/solver", 0, 0)
    assert first.outcome.observation == '["cup is there","jug is there"]'
    assert (first.outcome.action, first.outcome.terminated, second.outcome.reward) == (
        "look, look",
        False,
        1.0,
    )
    assert (played.metrics[TOOL_CALLS], played.metrics[TOOL_PROBLEMS]) == (2, 0)
    check(played)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (written_call("lok", {}), "There is no tool 'lok'; did you mean 'look'?"),
        (written_call("look", {}), "look: wrong arguments: what: Field required"),
        ("<tool_call>{look</tool_call>", "A tool call could not be read: '{look'."),
    ],
)
def test_a_mistake_is_an_observation_for_its_agent_alone(stage, said: str, told: str) -> None:
    bench = Bench()
    script = stage.Script({"t/info": [said, "fine"], "t/plan": ["go"], "t/solver": ["42"]})
    agents = {"info": agent(bench.box), "plan": agent(), "solver": agent()}
    played = stage.play(team(three, **agents), script)
    assert script.asked == ["t/info", "t/plan", "t/info", "t/solver"]
    assert told in script.prompts[2]
    assert told not in script.prompts[3]
    assert played.metrics[TOOL_PROBLEMS] == 1
    assert not played.turns[0].outcome.valid


def test_whoever_answers_first_the_calls_stand_in_declared_order(stage) -> None:
    """The same is trained whether agents run side by side or one after the other; only the time differs."""
    lines = {
        "t/info": [look("slow", 9), look("again", 1), "info"],
        "t/plan": [look("quick", 1), "plan"],
        "t/solver": ["42"],
    }
    found: dict[bool, tuple[str, float, list[str]]] = {}
    for side_by_side in (False, True):
        bench = Bench()
        players = team(
            three,
            Performance(enable_parallel_agents=side_by_side),
            info=agent(bench.box),
            plan=agent(bench.box),
            solver=agent(),
        )
        played, seconds = stage.timed(players, stage.Script(lines))
        found[side_by_side] = stage.trained(played), seconds, stage.agents(played)
    assert found[True][2] == ["info", "plan", "info", "plan", "info", "solver"]
    assert found[True][0] == found[False][0]
    assert found[True][1] < found[False][1]


def test_an_agent_that_calls_to_the_last_has_no_answer_and_is_invalid(stage) -> None:
    bench = Bench()
    players = team(alone, solver=agent(bench.box, max_tool_turns=3, invalid_penalty=-0.5))
    env = stage.Env()
    played = stage.play(players, stage.Script({"t/solver": [look("cup")]}), env)
    assert (len(played.turns), len(bench.made), env.answers) == (3, 2, [""])
    assert [turn.outcome.penalty for turn in played.turns] == [0, 0, -0.5]
    assert played.metrics[f"t/solver.{INVALID}"] == 1


def test_a_tool_that_ends_the_episode_ends_the_call_with_its_result_as_the_answer(stage) -> None:
    bench = Bench()
    script = stage.Script(
        {"t/info": [written_call("submit", {"answer": "SECRET"})], "t/plan": ["go"], "t/solver": ["42"]}
    )
    agents = {"info": agent(bench.box), "plan": agent(), "solver": agent()}
    played = stage.play(team(three, **agents), script)
    assert stage.agents(played) == ["info", "plan", "solver"]
    assert "SECRET" in script.prompts[2]
    assert played.reward == 1.0


def test_a_frozen_agents_tool_calls_are_frozen_too(stage) -> None:
    script = stage.Script({"t/solver": [look("cup"), "42"]})
    played = stage.play(team(alone, solver=agent(Bench().box, trainable=False)), script)
    assert [turn.filtered for turn in played.turns] == [FROZEN, FROZEN]


def test_what_tools_hold_lasts_for_the_episode_and_is_given_back(stage) -> None:
    bench = Bench()
    lines = [written_call("write", {"word": "a"}), "go on", written_call("write", {"word": "b"}), "42"]
    script = stage.Script({"t/solver": lines})
    stage.play(team(alone, solver=agent(bench.box)), script, stage.Env(steps=2))
    assert script.prompts[3].endswith("a b")
    assert (bench.pool.leased, bench.pool.made) == (0, 1)


def test_cancelling_a_rollout_of_a_team_frees_its_resource_at_once(stage) -> None:
    bench = Bench()
    script = stage.Script({"t/solver": [written_call("write", {"word": "a"}), look("cup", 1e5)]})

    async def main() -> None:
        task = asyncio.create_task(stage.perform(team(alone, solver=agent(bench.box)), script))
        await asyncio.sleep(10)
        assert (bench.made, bench.pool.leased) == (["cup"], 1)
        task.cancel()
        await asyncio.wait({task})
        assert bench.pool.leased == 0
        assert asyncio.get_running_loop().time() == pytest.approx(10)

    run_virtual(main())


def test_a_tool_that_cannot_be_run_ends_the_attempt_at_its_boundary(stage) -> None:
    bench = Bench()
    script = stage.Script({"t/solver": [written_call("write", {"word": "a"}), written_call("unplugged", {})]})
    with pytest.raises(EpisodeFailure) as caught:
        stage.play(team(alone, solver=agent(bench.box)), script)
    assert caught.value.record.boundary is Boundary.TOOL
    assert bench.pool.leased == 0


def test_the_profile_names_agents_and_their_tools(stage) -> None:
    lines = {"t/info": [look("cup", 3), "x"], "t/plan": ["go"], "t/solver": [look("jug", 5), "42"]}
    agents = {"info": agent(Bench().box), "plan": agent(), "solver": agent(Bench().box)}
    profile = Profile.of([stage.play(team(three, **agents), stage.Script(lines))])
    waited = {row.agent: row.waited[Phase.TOOL] for row in profile.agents()}
    assert waited["t/info"] == pytest.approx(3)
    assert waited["t/solver"] == pytest.approx(5)
    (tool_row,) = [row for row in profile.things() if row.phase is Phase.TOOL]
    assert (tool_row.name, tool_row.tally.count) == ("look", 2)


class Records:
    """A journal in memory."""

    def __init__(self, recorded: Sequence[JournalEntry] = ()) -> None:
        self.recorded = {entry.place: entry for entry in recorded}
        self.appended: list[JournalEntry] = []

    async def append(self, entry: JournalEntry) -> None:
        self.appended.append(JournalEntry.from_bytes(entry.to_bytes()))


@pytest.mark.parametrize("recorded", range(5))
def test_a_resumed_episode_ends_as_the_whole_one_and_calls_no_tool_whose_result_is_recorded(
    stage, recorded: int
) -> None:
    lines = [look("cup"), look("jug"), "not yet", look("pot"), "42"]

    def play(bench: Bench, journal: Records, done: int) -> tuple[Trajectory, int]:
        script = stage.Script({"t/solver": lines[done:]})
        env = stage.Env(steps=3)
        played = stage.play(team(alone, solver=agent(bench.box)), script, env, journal=journal)
        return played, len(script.asked)

    journal, bench = Records(), Bench()
    whole, _ = play(bench, journal, 0)
    again = Bench()
    resumed, asked = play(again, Records(journal.appended[:recorded]), recorded)
    assert asked == len(lines) - recorded
    assert stage.trained(resumed) == stage.trained(whole)
    made_before = {0: 0, 1: 0, 2: 1, 3: 2, 4: 2}[recorded]
    assert again.made == bench.made[made_before:]


SETTINGS: dict[str, Any] = {
    "policy": {"kind": "simulated", "tokens_per_second": 1e6, "mean_tokens": 5, "skill": 0.9},
    "custom_envs": {"Sums": {"env_type": "rollwright.teams.toy_envs:Sums", "max_tokens_per_step": 400}},
    "train_env_manager": {"num_env_groups": 8, "group_size": 2, "tags": ["Sums"]},
}


def one_agent(*tools: Any, **more: Any) -> dict[str, Any]:
    solver = {"prompt": "{question} Put it in \\boxed{{}}.", "tools": list(tools), **more}
    return {
        **SETTINGS,
        "orchestras": {"Sums": {"kind": "loop", "acts": "solver", "agents": {"solver": solver}}},
    }


async def test_one_agent_with_tools_is_played_from_its_settings() -> None:
    async with Run(build(one_agent("calculator", max_tool_turns=3))) as run:
        trajectories = (await run.get_batch()).trajectories
    assert sum(each.metrics.get(TOOL_CALLS, 0) for each in trajectories) > 0
    assert sum(each.metrics.get(TOOL_PROBLEMS, 0) for each in trajectories) == 0
    observed = [
        json.loads(turn.outcome.observation)
        for each in trajectories
        for turn in each.turns[:-1]
        if turn.outcome is not None
    ]
    assert observed
    assert all(result[0].isdigit() for result in observed), "the calculator has computed"


def test_tools_with_the_same_settings_are_shared_and_others_are_not() -> None:
    limited = {"kind": "calculator", "concurrency": 3}
    settings = one_agent(limited)
    agents = settings["orchestras"]["Sums"]["agents"]
    agents["other"] = {"prompt": "{question}", "tools": [limited]}
    agents["third"] = {"prompt": "{question}", "tools": ["calculator"]}
    team = build_teams(build(settings))["Sums"]
    boxes = {name: each.toolbox for name, each in team.agents.items()}
    assert boxes["solver"]["calculator"] is boxes["other"]["calculator"]
    assert boxes["solver"]["calculator"].concurrency == 3
    assert boxes["third"]["calculator"].concurrency is None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (
            ["calculater"],
            r"agents\.solver\.tools\.0\.kind: unknown `calculater` .*known: bash, calculator, python, search",
        ),
        (["calculator", "calculator"], r"agents\.solver\.tools: two tools are named 'calculator'"),
        (["nowhere:tool"], r"tools\.0\.function: tool nowhere:tool: cannot be imported"),
        (["os.path:sep"], r"tools\.0\.function: 'os\.path:sep' is no tool"),
        ([{"kind": "search"}], r"agents\.solver\.tools\.0\.passages: either this or url is needed"),
        ([{"kind": "search", "passages": "nowhere.jsonl"}], r"nowhere\.jsonl: cannot be read"),
        ([{"kind": "python", "sise": 3}], r"tools\.0\.sise: unknown key; did you mean `size`"),
    ],
)
def test_wrong_tools_are_refused_in_one_line(tools: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_teams(build(one_agent(*tools)))
    assert "\n" not in str(caught.value)


def test_a_policy_that_cannot_be_told_of_tools_is_refused() -> None:
    text = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m", "api": "completions"}
    with pytest.raises(ConfigError, match=r"agents\.solver\.tools: this agent's policy takes no tools"):
        build_run_policy(build({**one_agent("calculator"), "policy": text}))


def test_own_tools_and_passages_come_from_where_the_settings_say(tmp_path) -> None:
    file = tmp_path / "passages.jsonl"
    file.write_bytes(msgspec.json.encode({"text": "The Aare is a river.", "title": "Aare"}) + b"\n")
    settings = one_agent(f"{__name__}:own", {"kind": "search", "passages": str(file)})
    box = build_teams(build(settings))["Sums"].agents["solver"].toolbox
    assert [spec.name for spec in box.specs] == ["shout", "search"]


def own() -> Any:
    @tool
    async def shout(word: str) -> str:
        return word.upper()

    return [shout]
