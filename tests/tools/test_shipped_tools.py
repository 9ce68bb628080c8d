"""Built-in tools: the calculator cannot hang, search finds passages, the sandbox works with and without state."""

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollwright.aio import run_virtual
from rollwright.errors import ConfigError
from rollwright.sandbox.protocol import ExecutionResult, SandboxLimits
from rollwright.tools import Problem, Toolbox, ToolContext, ToolFailure
from rollwright.tools.calculator import calculate, calculator
from rollwright.tools.python import PythonSandbox
from rollwright.tools.search import Bm25Index, HttpSearch, Passage, search_tool
from rollwright.tools.settings import PythonToolConfig
from rollwright.trajectory import ToolCall


async def call(box: Toolbox, name: str, context: ToolContext | None = None, **arguments: Any) -> Any:
    async with ToolContext("r") as own:
        return (await box.run([ToolCall("c", name, json.dumps(arguments))], context or own))[0]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4) ** 2", 98),
        ("-7 // 2 % 5", 1),
        ("2^10", 1024),
        ("sqrt(2) / pi", math.sqrt(2) / math.pi),
        ("max(1, 2, factorial(5))", 120),
        ("1e3 + .5", 1000.5),
        ("round(2.567, 2)", 2.57),
    ],
)
def test_a_calculator_computes(expression: str, value: float) -> None:
    assert calculate(expression) == pytest.approx(value)


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "2**-99999999",
        "(" * 60 + "1" + ")" * 60 + "-" * 60 + "1",
        "factorial(10**6)",
        "__import__('os')",
        "(1).__class__",
        "[1, 2]",
        "'a' * 10**9",
        "True + 1",
        "1 / 0",
        "1 +",
        "",
        "(-8) ** 0.5",
        "x",
        "1" * 2000,
        "10**1200 * 10**1200",
        "sqrt(-1)",
        "lambda: 1",
    ],
)
def test_what_is_no_sum_is_refused_quickly(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        calculate(expression)


@given(st.text(max_size=80))
def test_no_text_makes_a_calculator_raise_anything_else(text: str) -> None:
    with suppress(ValueError):
        assert isinstance(calculate(text), int | float)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.sampled_from("+-*"))
def test_whole_numbers_stay_exact(left: int, right: int, sign: str) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert calculate(f"{left} {sign} ({right})") == expected


async def test_a_wrong_sum_is_an_observation() -> None:
    result = await call(Toolbox([calculator]), "calculator", expression="1 / 0")
    assert (result.problem, result.content) == (
        Problem.EXCEPTION,
        "calculator failed: ValueError: division by zero",
    )


PASSAGES = [
    Passage("Bern is the seat of the government of Switzerland.", "Bern"),
    Passage("The Rhine flows through Basel to the North Sea.", "Rhine"),
    Passage("Cheese fondue is melted cheese, eaten with bread."),
]


async def test_search_finds_the_best_passages_and_says_when_there_are_none() -> None:
    box = Toolbox([search_tool(Bm25Index(PASSAGES))])
    found = (await call(box, "search", query="which river flows through Basel?", count=1)).content
    assert found == "[1] Rhine\nThe Rhine flows through Basel to the North Sea."
    assert (await call(box, "search", query="cheese")).content.startswith("[1] Cheese fondue")
    assert (await call(box, "search", query="submarine xylophone")).content == "Nothing was found."
    assert (await call(box, "search", query="")).content == "Nothing was found."
    assert (await call(box, "search", query="cheese", count=99)).problem is None
    with pytest.raises(ConfigError, match="at least one passage"):
        Bm25Index([])


class Server:
    """A search server that can be busy, broken or wrong."""

    def __init__(self) -> None:
        self.index = Bm25Index(PASSAGES)
        self.answers: list[web.Response] = []
        """Responses before the regular ones."""
        self.asked = 0

    async def search(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.answers:
            return self.answers.pop(0)
        asked = await request.json()
        found = self.index.find(asked["query"], asked["count"])
        return web.json_response({"results": [{"title": each.title, "text": each.text} for each in found]})


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, HttpSearch]]:
    made = Server()
    app = web.Application()
    app.router.add_post("/search", made.search)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    search = HttpSearch(f"http://127.0.0.1:{runner.addresses[0][1]}/search")
    yield made, search
    await search.close()
    await runner.cleanup()


async def test_search_over_http_is_the_same_tool(server: tuple[Server, HttpSearch]) -> None:
    box = Toolbox([search_tool(server[1])])
    assert (await call(box, "search", query="government", count=1)).content.startswith("[1] Bern\n")


async def test_a_busy_search_server_is_asked_again_and_a_broken_one_ends_the_attempt(
    server: tuple[Server, HttpSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollwright.tools.search._FIRST_WAIT", 0.01)
    made, search = server
    box = Toolbox([search_tool(search)])
    made.answers = [web.Response(status=503), web.Response(status=429)]
    assert (await call(box, "search", query="Rhine")).problem is None
    assert made.asked == 3
    for answer, said in ((web.Response(status=404), "404"), (web.Response(text="[]"), "malformed response")):
        made.answers = [answer]
        with pytest.raises(ToolFailure, match=said):
            await call(box, "search", query="Rhine")


async def test_a_search_server_that_is_not_there_ends_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.tools.search._FIRST_WAIT", 0.01)
    search = HttpSearch("http://127.0.0.1:9/search")
    with pytest.raises(ToolFailure, match=r"search at http://127\.0\.0\.1:9/search"):
        await call(Toolbox([search_tool(search)]), "search", query="Rhine")
    await search.close()


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@linux_only
async def test_a_sandbox_keeps_its_state_for_one_rollout_and_is_given_back() -> None:
    python = PythonSandbox(PythonToolConfig(kind="python", seconds=5, size=2))
    await python.check()
    box = Toolbox([python.tool()])
    assert box["python"].stateful
    async with ToolContext("first") as first, ToolContext("second") as second:
        assert (await call(box, "python", first, code="x = 6")).content == "[no output]"
        assert (await call(box, "python", first, code="x * 7")).content == "42"
        assert "NameError" in (await call(box, "python", second, code="x")).content
        assert python.pool.leased == 2
        crashed = await call(box, "python", first, code="import ctypes\nctypes.string_at(0)")
        assert "variables and files are gone" in crashed.content
        assert "NameError" in (await call(box, "python", first, code="x")).content
    assert python.pool.leased == 0
    await python.close()


@linux_only
async def test_calls_of_one_turn_share_the_sandbox_and_one_that_ends_it_does_not_fail_the_others_silently() -> (
    None
):
    python = PythonSandbox(PythonToolConfig(kind="python", size=1))
    box = Toolbox([python.tool()])
    codes = ("x = 1", "import ctypes\nctypes.string_at(0)", "x")
    async with ToolContext("r") as context:
        calls = [ToolCall(f"c{at}", "python", json.dumps({"code": code})) for at, code in enumerate(codes)]
        first, second, third = await box.run(calls, context)
        assert first.content == "[no output]"
        assert "signal 11" in second.content
        assert "another call of the same turn ended the interpreter" in third.content
        assert (await call(box, "python", context, code="print('new')")).content == "new"
    await python.close()


def test_a_call_whose_sandbox_ended_before_it_could_begin_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are immediate: the second call ends the sandbox before the third has started."""
    opened: list[str] = []

    class Quick:
        async def run(self, code: str) -> ExecutionResult:
            return ExecutionResult("", "", has_ended=code == "end")

        def close(self) -> None:
            opened.append("closed")

    class QuickFactory:
        def __init__(self, limits: SandboxLimits, *, folders: Any, allow_unconfined: bool) -> None:
            self.limits = limits

        async def open(self) -> Quick:
            await asyncio.sleep(1)
            opened.append("opened")
            return Quick()

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "quick_sandboxes", SimpleNamespace(QuickFactory=QuickFactory))

    async def main() -> list[str]:
        settings = PythonToolConfig(kind="python", size=4, sandbox="quick_sandboxes:QuickFactory")
        calls = [ToolCall(code, "python", json.dumps({"code": code})) for code in ("x", "end", "y")]
        async with ToolContext("r") as context:
            toolbox = Toolbox([PythonSandbox(settings).tool()])
            return [result.content for result in await toolbox.run(calls, context)]

    first, second, third = run_virtual(main())
    assert (first, opened) == ("[no output]", ["opened", "closed"])
    assert "was restarted" in second
    assert "another call of the same turn ended the interpreter" in third


@linux_only
async def test_a_sandbox_without_state_is_new_for_every_call() -> None:
    python = PythonSandbox(PythonToolConfig(kind="python", size=2))
    box = Toolbox([python.tool(stateful=False)])
    assert not box["python"].stateful
    assert (await call(box, "python", code="x = 1\nprint(x)")).content == "1"
    assert "NameError" in (await call(box, "python", code="x")).content
    assert python.pool.leased == 0
    await python.close()


@linux_only
async def test_cancelling_a_rollout_ends_the_code_it_was_waiting_for() -> None:
    python = PythonSandbox(PythonToolConfig(kind="python", size=1))
    box = Toolbox([python.tool()])

    async def play() -> None:
        async with ToolContext("r") as context:
            await call(box, "python", context, code="while True: pass")

    task = asyncio.create_task(play())
    async with asyncio.timeout(60):
        while not python.pool.leased:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)  # so that it is in the loop
    task.cancel()
    await asyncio.wait({task})
    assert python.pool.leased == 0
    assert (await asyncio.wait_for(call(box, "python", code="1"), 30)).content == "1"
    await python.close()
