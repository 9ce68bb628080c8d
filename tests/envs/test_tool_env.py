"""`ToolEnv` parses calls from text, returns results as observations and scores the answer."""

import sys
from types import ModuleType
from typing import Any

import pytest

from rollwright.agents import ChatAgent
from rollwright.aio import run_virtual
from rollwright.envs import registry
from rollwright.envs.adapters.tool_env import Task, ToolEnv
from rollwright.errors import ConfigError, RollwrightError
from rollwright.rollout.tree import ForkMode, fork_mode
from rollwright.tools import Pool, Toolbox, ToolContext, tool
from rollwright.tools.calculator import calculator

TASKS = [Task("What is 6 * 7?", "42"), Task("What is 2 + 2?", "4")]


def exact(task: Task, answer: str) -> float:
    return float(answer == task.truth)


class Held:
    """Counts the resources that tools hold."""

    def __init__(self) -> None:
        self.pool: Pool[list[str]] = Pool(self._make, size=1)
        pool = self.pool

        @tool
        async def note(word: str, context: ToolContext) -> str:
            page = await context.lease(pool)
            page.append(word)
            return " ".join(page)

        @tool(ends_episode=True)
        async def submit(answer: str) -> str:
            return answer

        self.box = Toolbox([calculator, note, submit])

    async def _make(self, key: Any) -> list[str]:
        return []


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_calls_are_answered_and_the_answer_scored() -> None:
    async def main() -> None:
        held = Held()
        env = ToolEnv(TASKS, exact, held.box, format_penalty=-0.1)
        assert (await env.reset(2)).observation == "What is 6 * 7?"
        step = await env.step(
            "Let me see. " + call("calculator", '{"expression": "6*7"}') + call("note", '{"word": "a"}')
        )
        assert (
            step.observation == "<tool_response>\n42\n</tool_response>\n<tool_response>\na\n</tool_response>"
        )
        assert (step.terminated, step.info["valid"], step.info["metrics"]["tool_calls"]) == (False, True, 2)
        assert (
            await env.step(call("note", '{"word": "b"}'))
        ).observation == "<tool_response>\na b\n</tool_response>"
        assert held.pool.leased == 1
        end = await env.step("<answer>42</answer>")
        assert (end.reward, end.terminated, end.info["success"]) == (1.0, True, True)
        assert held.pool.leased == 0
        with pytest.raises(RollwrightError, match="call reset first"):
            await env.step("more")

    run_virtual(main())


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("I do not know.", "neither a call"),
        (call("calculatr", "{}"), "did you mean 'calculator'?"),
        (call("calculator", '{"sum": 1}'), "expression: Field required"),
        ("<tool_call>6*7</tool_call>", "could not be read: '6*7'"),
        (call("calculator", '{"expression": "1/0"}'), "division by zero"),
    ],
)
def test_a_mistake_is_told_costs_the_penalty_and_does_not_end_the_episode(answer: str, told: str) -> None:
    async def main() -> None:
        env = ToolEnv(TASKS, exact, Held().box, format_penalty=-0.1)
        await env.reset(0)
        step = await env.step(answer)
        assert told in step.observation
        assert (step.reward, step.terminated, step.info["valid"], step.info["penalty"]) == (
            0.0,
            False,
            False,
            -0.1,
        )
        assert (await env.step("<answer>41</answer>")).reward == 0.0

    run_virtual(main())


def test_a_tool_that_ends_the_episode_hands_in_the_answer() -> None:
    async def score(task: Task, answer: str) -> float:
        return exact(task, answer)

    async def main() -> None:
        env = ToolEnv(TASKS, score, Held().box)
        await env.reset(1)
        end = await env.step(call("submit", '{"answer": "4"}'))
        assert (end.reward, end.terminated, end.info["action"]) == (1.0, True, "4")

    run_virtual(main())


def test_what_tools_hold_is_given_back_by_reset_and_by_close() -> None:
    async def main() -> None:
        held = Held()
        env = ToolEnv(TASKS, exact, held.box)
        for way_out in (lambda: env.reset(1), env.close):
            await env.reset(0)
            await env.step(call("note", '{"word": "a"}'))
            assert held.pool.leased == 1
            await way_out()
            assert held.pool.leased == 0

    run_virtual(main())


def test_it_is_made_by_a_factory_of_ones_own_and_its_prompts_name_the_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("my_tools")

    def make(penalty: float = 0.0) -> ToolEnv:
        return ToolEnv(TASKS, exact, Held().box, format_penalty=penalty)

    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_tools", module)
    env = registry.make("my_tools:make", {"penalty": -0.5})
    agent = ChatAgent(env.prompts)
    agent.check_templates("here")
    system, user = agent.opening(env, "What is 6 * 7?")
    assert '"name": "calculator"' in user.content
    assert user.content.endswith("What is 6 * 7?")
    assert system.content


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        ToolEnv([], exact, Held().box)
    with pytest.raises(ConfigError, match="zero or negative"):
        ToolEnv(TASKS, exact, Held().box, format_penalty=1)


def test_tools_without_state_let_the_environment_fork_and_others_are_replayed() -> None:
    """D2: a fork repeats no tool call and continues independently."""
    made: list[str] = []

    @tool
    async def look(what: str) -> str:
        made.append(what)
        return f"{what} is there"

    async def main() -> None:
        env = ToolEnv(TASKS, exact, Toolbox([look]))
        assert env.stateless
        assert fork_mode(env, None) is ForkMode.FORK
        await env.reset(0)
        await env.step(call("look", '{"what": "cup"}'))
        other = env.fork()
        assert (await other.step("<answer>42</answer>")).reward == 1.0
        assert "jug is there" in (await env.step(call("look", '{"what": "jug"}'))).observation
        assert (await env.step("<answer>41</answer>")).reward == 0.0
        assert made == ["cup", "jug"]
        holding = ToolEnv(TASKS, exact, Held().box)
        assert not holding.stateless
        assert fork_mode(holding, None) is ForkMode.REPLAY
        with pytest.raises(RollwrightError, match="stateful tool cannot be copied"):
            holding.fork()

    run_virtual(main())
