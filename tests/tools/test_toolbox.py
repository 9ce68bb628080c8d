"""Calls of one turn run concurrently; every mistake of a model becomes an observation."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from rollwright.aio import run_virtual
from rollwright.errors import ConfigError
from rollwright.tools import EndEpisode, Pool, Problem, Toolbox, ToolContext, ToolError, ToolFailure, tool
from rollwright.trajectory import ToolCall


@tool
async def sleep(seconds: float) -> float:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return seconds


@tool(time_limit=5.0)
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@tool
async def broken(kind: str = "") -> None:
    if kind == "own words":
        raise ToolError("the moon is not up")
    if kind == "exit":
        sys.exit(3)
    if kind == "timeout":
        raise TimeoutError
    raise ValueError("out of cheese")


@tool(ends_episode=True)
async def submit(answer: str) -> str:
    """Hands in the answer."""
    return answer


@tool
async def maybe_end(end: bool) -> Any:
    return EndEpisode({"final": True}) if end else {"final": False}


@tool
async def unplugged() -> None:
    raise ToolFailure("no power")


BOX = Toolbox([sleep, slow, broken, submit, maybe_end, unplugged])


def calls(*asked: tuple[str, str]) -> list[ToolCall]:
    return [ToolCall(f"c{at}", name, arguments) for at, (name, arguments) in enumerate(asked)]


async def run(*asked: tuple[str, str], box: Toolbox = BOX) -> Any:
    async with ToolContext("r") as context:
        return await box.run(calls(*asked), context)


def test_calls_of_one_turn_run_side_by_side_and_answer_in_order() -> None:
    async def main() -> None:
        results = await run(*[("sleep", f'{{"seconds": {seconds}}}') for seconds in (3, 1, 2)])
        assert asyncio.get_running_loop().time() == pytest.approx(3)
        assert [each.content for each in results] == ["3.0", "1.0", "2.0"]
        assert [each.message().tool_call_id for each in results] == ["c0", "c1", "c2"]
        assert [each.seconds for each in results] == pytest.approx([3, 1, 2])

    run_virtual(main())


@pytest.mark.parametrize(
    ("name", "arguments", "problem", "said"),
    [
        (
            "sleeep",
            "{}",
            Problem.UNKNOWN_TOOL,
            "There is no tool 'sleeep'; did you mean 'sleep'? Tools: sleep, slow,",
        ),
        ("sleep", '{"seconds": "long"}', Problem.BAD_ARGUMENTS, "seconds: Input should be a valid number"),
        ("sleep", "{}", Problem.BAD_ARGUMENTS, "It takes: seconds (number)."),
        ("broken", "{}", Problem.EXCEPTION, "broken failed: ValueError: out of cheese"),
        ("broken", '{"kind": "exit"}', Problem.EXCEPTION, "broken failed: SystemExit: 3"),
        ("broken", '{"kind": "timeout"}', Problem.EXCEPTION, "broken failed: TimeoutError"),
        ("broken", '{"kind": "own words"}', Problem.EXCEPTION, "the moon is not up"),
        ("slow", '{"seconds": 9}', Problem.TIMEOUT, "slow gave no result within 5 s."),
    ],
)
def test_a_mistake_becomes_an_observation_that_says_what_was_wrong(
    name: str, arguments: str, problem: Problem, said: str
) -> None:
    (result,) = run_virtual(run((name, arguments)))
    assert result.problem is problem
    assert said in result.content
    assert not result.ends_episode


def test_one_calls_failure_does_not_touch_the_others_of_its_turn() -> None:
    good, bad = run_virtual(run(("sleep", '{"seconds": 2}'), ("broken", "{}")))
    assert (good.content, good.problem, bad.problem) == ("2.0", None, Problem.EXCEPTION)


def test_a_tool_can_end_the_episode_always_or_by_what_it_returns() -> None:
    handed_in, ends, goes_on, wrong = run_virtual(
        run(
            ("submit", '{"answer": "42"}'),
            ("maybe_end", '{"end": true}'),
            ("maybe_end", '{"end": false}'),
            ("submit", "{}"),
        )
    )
    assert (handed_in.content, handed_in.ends_episode) == ("42", True)
    assert (ends.content, ends.ends_episode, ends.value) == ('{"final":true}', True, {"final": True})
    assert (goes_on.content, goes_on.ends_episode) == ('{"final":false}', False)
    assert not wrong.ends_episode


def test_a_tool_that_cannot_be_run_at_all_is_a_failure_and_ends_the_other_calls() -> None:
    ended: list[str] = []

    @tool
    async def waits() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("waits")

    with pytest.raises(ToolFailure, match="no power"):
        run_virtual(run(("waits", "{}"), ("unplugged", "{}"), box=Toolbox([waits, unplugged])))
    assert ended == ["waits"]


def test_a_concurrency_limit_holds_over_all_rollouts_and_waiting_is_not_running() -> None:
    running: list[int] = [0, 0]

    @tool(concurrency=2, time_limit=1.5)
    async def narrow() -> None:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(1)
        running[0] -= 1

    async def main() -> None:
        box = Toolbox([narrow])
        several = await asyncio.gather(*(run(("narrow", "{}"), box=box) for _ in range(6)))
        assert all(result.problem is None for (result,) in several)
        assert sorted(round(result.waited) for (result,) in several) == [0, 0, 1, 1, 2, 2]

    run_virtual(main())
    assert running[1] == 2


def test_waiting_in_line_for_a_resource_does_not_count_against_the_time_limit() -> None:
    async def make(key: Any) -> str:
        return "thing"

    async def main() -> None:
        pool = Pool(make, size=1)

        @tool(time_limit=5)
        async def use(seconds: float, context: ToolContext) -> str:
            thing = await context.lease(pool)
            await asyncio.sleep(seconds)
            return thing

        box = Toolbox([use])
        asked = [f'{{"seconds": {seconds}}}' for seconds in (3, 3, 3, 6)]
        several = await asyncio.gather(*(run(("use", arguments), box=box) for arguments in asked))
        assert [result.problem for (result,) in several] == [None, None, None, Problem.TIMEOUT]
        assert asyncio.get_running_loop().time() == pytest.approx(14)

    run_virtual(main())


def test_calls_of_one_turn_stand_in_line_together() -> None:
    """Calls that joined the wait later also have their full time limit left when the lease is granted."""

    async def make(key: Any) -> str:
        await asyncio.sleep(1)
        return "thing"

    async def main() -> None:
        pool = Pool(make, size=1)
        lines: list[tuple[str, float]] = []
        clock = asyncio.get_running_loop().time

        class Noted:
            @contextmanager
            def in_line(self) -> Iterator[None]:
                began = clock()
                yield
                lines.append(("line", clock() - began))

        @tool(time_limit=5)
        async def use(context: ToolContext) -> str:
            thing = await context.lease(pool)
            await asyncio.sleep(3)
            return thing

        box = Toolbox([use])
        other = await pool.acquire()
        asyncio.get_running_loop().call_later(20, other.release)
        async with ToolContext("r") as context:
            calls = [ToolCall(str(number), "use", "{}") for number in range(3)]
            results = await box.run(calls, context, lambda call: nullcontext(Noted()))
        assert [result.problem for result in results] == [None] * 3
        assert clock() == pytest.approx(1 + 20 + 1 + 3)
        assert [line for line in lines if line[1]] == [("line", pytest.approx(20))] * 3

    run_virtual(main())


async def test_a_plain_function_runs_in_a_thread_and_does_not_hold_up_the_loop() -> None:
    together = threading.Barrier(3)

    @tool
    def meet() -> str:
        together.wait(20)
        return threading.current_thread().name

    results = await run(*[("meet", "{}")] * 3, box=Toolbox([meet]))
    assert [each.content for each in results] == ["tool meet"] * 3


async def test_a_hung_function_is_told_as_late_and_keeps_its_place_until_it_ends() -> None:
    go_on = threading.Event()
    second = threading.Event()

    @tool(concurrency=1, time_limit=0.05)
    def hang(first: bool) -> str:
        if first:
            go_on.wait(20)
        second.set()
        return "ran"

    @tool
    def other() -> str:
        return "ran beside"

    box = Toolbox([hang, other])
    (late,) = await run(("hang", '{"first": true}'), box=box)
    assert late.problem is Problem.TIMEOUT
    waiting = asyncio.create_task(run(("hang", '{"first": false}'), box=box))
    (beside,) = await run(("other", "{}"), box=box)
    assert beside.content == "ran beside"
    assert not second.is_set()
    go_on.set()
    (result,) = await asyncio.wait_for(waiting, 20)
    assert result.content == "ran"


async def test_a_plain_function_that_exits_does_not_end_the_process() -> None:
    @tool
    def leave() -> None:
        raise SystemExit(1)

    (result,) = await run(("leave", "{}"), box=Toolbox([leave]))
    assert result.problem is Problem.EXCEPTION
    assert "SystemExit" in result.content


def test_structured_results_are_json_and_long_ones_are_cut_and_say_so() -> None:
    @tool
    async def structured() -> Any:
        return {"names": ["a", "ü"], "count": 2, "none": None}

    @tool(max_length=10)
    async def long() -> str:
        return "x" * 25

    @tool
    async def nothing() -> None: ...

    box = Toolbox([structured, long, nothing])
    first, second, third = run_virtual(run(("structured", ""), ("long", "{}"), ("nothing", "{}"), box=box))
    assert first.content == '{"names":["a","ü"],"count":2,"none":null}'
    assert second.content == "x" * 10 + "\n[cut: 15 more characters]"
    assert third.content == ""


def test_two_tools_of_one_name_and_useless_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'sleep'"):
        Toolbox([sleep, sleep])
    with pytest.raises(ConfigError, match="time_limit must be more than 0"):
        tool(time_limit=0)(lambda: None)


def test_what_cannot_be_read_as_a_call_is_shown_again() -> None:
    told = BOX.unreadable("<tool_call>{sleep" + "x" * 1000)
    assert told.startswith("A tool call could not be read: '<tool_call>{sleepxxx")
    assert "Tools: sleep," in told
    assert len(told) < 400
