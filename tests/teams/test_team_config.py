"""Teams from YAML: what is wrong shows before the start, and what is right plays inside the one pipeline."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollwright.aio import run_virtual
from rollwright.config import build
from rollwright.engines.base import Prompt, Sampling
from rollwright.errors import ConfigError
from rollwright.run.build_teams import build_run_policy, build_teams
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.teams import CriticLoop, Route, TeamPolicies, Verdict
from rollwright.training.advantages import AgentWise
from rollwright.training.rows import build_rows
from rollwright.trajectory import Message

PANEL = """
max_inflight: 64
agent: {performance: {enable_parallel_agents: true}}
custom_envs:
  Sums: {env_type: "rollwright.teams.toy_envs:Sums", max_tokens_per_step: 400}
  Lookup: {env_type: "rollwright.teams.toy_envs:Lookup", max_steps: 4, max_tokens_per_step: 400}
train_env_manager: {num_env_groups: 4, group_size: 4, tags: [Sums, Lookup]}
val_env_manager: {num_env_groups: 2, tags: [Sums, Lookup]}
orchestras:
  Sums:
    kind: loop
    name: panel
    acts: writer
    critic: judge
    max_loops: 2
    agents:
      facts: {prompt: "{question} Which facts matter?"}
      plan: {prompt: "{question} How would you go about it?", trainable: false}
      writer: {prompt: "{question}\\n{context}\\nAnswer.", after: [facts, plan], invalid_penalty: -0.5}
      judge:
        prompt: "{question}\\n{context}\\nGood?"
        verdict: {malformed: reject, tag: verdict, approve: good, reject: bad}
        sampling: {temperature: 0.2, max_tokens: 300}
  Lookup:
    kind: search
    agents:
      verifier: {verdict: {malformed: reject, approve: "yes", reject: "no"}}
"""


def settings(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load(PANEL), **changes}


def test_the_declared_form_says_who_depends_on_whom() -> None:
    teams = build_teams(build(settings()))
    panel = teams["Sums"]
    assert isinstance(panel.flow, CriticLoop)
    assert panel.flow.stages == (("facts", "plan"), ("writer",))
    assert (panel.flow.critic, panel.flow.max_loops, panel.flow.acts) == ("judge", 2, "writer")
    assert panel.performance.enable_parallel_agents
    assert not panel.agents["plan"].trainable
    assert isinstance(teams["Lookup"].flow, Route)


def test_what_is_unset_of_a_shipped_team_stays_as_it_is() -> None:
    verifier = build_teams(build(settings()))["Lookup"].agents["verifier"]
    assert verifier.verdict is not None
    assert verifier.verdict.malformed is Verdict.REJECT
    assert "{observation}" in verifier.prompt


def test_teams_play_inside_the_pipeline_in_training_and_in_validation() -> None:
    async def run() -> Any:
        async with Run(build(settings())) as run:
            return await run.get_batch(), await run.evaluate()

    batch, validation = run_virtual(run())
    seen = {turn.agent for trajectory in batch.trajectories for turn in trajectory.turns}
    assert {"panel/facts", "panel/plan", "panel/writer", "panel/judge", "search/verifier"} <= seen
    assert {trajectory.stop for trajectory in batch.trajectories} <= {"terminated", "truncated"}
    assert any(trajectory.reward for trajectory in batch.trajectories)
    groups: dict[str, list[Any]] = {}
    for trajectory in batch.trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    rows = build_rows(list(groups.values()), AgentWise(), view="turns")
    trained = sum(turn.filtered is None for each in batch.trajectories for turn in each.turns)
    assert len(rows) == trained < sum(len(each.turns) for each in batch.trajectories)
    assert {turn.agent.partition("/")[0] for each in validation.trajectories for turn in each.turns} == {
        "panel",
        "search",
    }


def test_a_team_can_be_led_by_a_function_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"kind": "own", "agents": {"one": {"prompt": "{question}"}}}
    with pytest.raises(ConfigError, match=r"orchestras\.Sums\.function: .*cannot be imported"):
        build_teams(build(settings(orchestras={"Sums": {**own, "function": "nowhere:flow"}})))
    with pytest.raises(ConfigError, match="is no async function"):
        build_teams(build(settings(orchestras={"Sums": {**own, "function": "os.path:join"}})))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    found = build_teams(build(settings(orchestras={"Sums": {**own, "function": "teams:debate"}})))["Sums"]
    assert (found.name, list(found.agents)) == ("own", ["one"])


def test_the_example_plays_both_its_teams() -> None:
    example = Path(__file__).parents[2] / "examples" / "teams.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True)
    assert "debate/sceptic" in done.stdout
    assert "frozen" in done.stdout
    assert "search/verifier" in done.stdout


@pytest.mark.parametrize(
    ("team", "message"),
    [
        ({"kind": "math", "agents": {"solvr": {}}}, r"agents\.solvr: unknown; there are: solver, verifier"),
        ({"kind": "loop", "acts": "a", "agents": {"a": {}}}, r"agents\.a\.prompt: is needed"),
        ({"kind": "loop", "acts": "b", "agents": {"a": {"prompt": "x"}}}, "acts: 'b' is in no stage"),
        (
            {"kind": "loop", "acts": "a", "agents": {"a": {"prompt": "x", "after": ["z"]}}},
            "'z' is no agent of the loop",
        ),
        (
            {"kind": "loop", "acts": "a", "critic": "a", "max_loops": 2, "agents": {"a": {"prompt": "x"}}},
            "'a' gives no verdict; set its `verdict`",
        ),
        (
            {"kind": "loop", "acts": "a", "max_loops": 2, "agents": {"a": {"prompt": "x"}}},
            "max_loops: 2 rounds need a critic",
        ),
        (
            {"kind": "route", "router": "r", "approved": "a", "rejected": "b", "agents": {}},
            "has no agent 'r'",
        ),
        (
            {"kind": "math", "agents": {"solver": {"prompt": "{nope}"}}},
            r"solver\.prompt: 'nope' cannot be filled in",
        ),
        (
            {"kind": "math", "agents": {"solver": {"trainable": False, "invalid_penalty": 1}}},
            "invalid_penalty",
        ),
        (
            {"kind": "math", "agents": {"verifier": {"verdict": {"tag": "x"}}}},
            r"verdict\.malformed: is needed",
        ),
        (
            {"kind": "math", "agents": {"solver": {"policy": "big"}}},
            r"solver\.policy: no 'big' in `policies`",
        ),
        (
            {"kind": "math", "agents": {"solver": {"adapter": "x"}}},
            "kind simulated serves no adapters; accepted: vllm, openai",
        ),
    ],
)
def test_a_wrong_setting_is_one_clear_line(team: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_run_policy(build(settings(orchestras={"Sums": team})))


def test_two_teams_of_one_run_need_different_names() -> None:
    same = {"Sums": {"kind": "math"}, "Lookup": {"kind": "math"}}
    with pytest.raises(ConfigError, match=r"orchestras\.Lookup\.name: 'math' is the team of Sums already"):
        build_teams(build(settings(orchestras=same)))
    with pytest.raises(ConfigError, match=r"orchestras\.Chess: no such tag is played"):
        build_teams(build(settings(orchestras={"Chess": {"kind": "math"}})))
    with pytest.raises(ConfigError, match="a team plays along one path"):
        build_teams(build(settings(strategy={"kind": "tree"})))


ENGINE = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "base"}


async def test_an_engine_is_asked_for_an_agents_adapter_by_its_name() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["model"])
        said = {"message": {"role": "assistant", "content": "<verify>yes</verify>"}, "finish_reason": "stop"}
        return web.json_response({"choices": [said], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        engine = {**ENGINE, "base_url": str(server.make_url("/v1"))}
        agents = {
            "verifier": {"policy": "served", "adapter": "judge-lora"},
            "search": {"policy": "served", "adapter": "query-lora"},
            "answer": {"policy": "served", "adapter": "query-lora"},
        }
        team = {"kind": "search", "agents": agents}
        config = build(settings(orchestras={"Lookup": team}, policies={"served": engine}))
        policy = build_run_policy(config)
        assert isinstance(policy, TeamPolicies)
        assert policy.of_agent("search/search") is policy.of_agent("search/answer")
        assert isinstance(policy.of_agent("anybody"), SimulatedEngine)
        for name in agents:
            prompt = Prompt("r", ("k", f"search/{name}", 0), [Message("user", "?")])
            await policy.of_agent(f"search/{name}").generate(prompt, Sampling())
        await policy.close()
    assert asked == ["judge-lora", "query-lora", "query-lora"]


def test_a_run_that_trains_refuses_to_train_on_another_policys_tokens() -> None:
    team = {"kind": "math", "agents": {"verifier": {"policy": "served"}}}
    changes = {"orchestras": {"Sums": team}, "policies": {"served": ENGINE}, "training": {}}
    with pytest.raises(
        ConfigError, match=r"agents\.verifier: plays with a policy that this run does not train"
    ):
        build_run_policy(build(settings(**changes)))
    team["agents"]["verifier"]["trainable"] = False  # type: ignore[index]
    build_run_policy(build(settings(**changes)))


def test_without_a_team_nothing_changes() -> None:
    assert isinstance(build_run_policy(build({})), SimulatedEngine)
    assert build_teams(build({})) == {}
