"""An agent with tools: a search over HTTP, a Python sandbox with state, a calculator and a tool of one's own.

    python examples/tools.py

The tools are real: a little search server is started here, and the code runs in a locked-in process. Only the model is
not: a script plays its part, in the place of a policy. With a policy of your own (see `docs/policies.md`) the calls come
from the model, in its own format; in a worker, `agent` is what `rollwright worker --agent tools:agent` plays.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollwright import (
    BytesRenderer,
    Generation,
    Parsed,
    Prompt,
    Sampling,
    Session,
    Toolbox,
    ToolCall,
    ToolSpec,
    Trajectory,
    VersionRun,
    floats,
    tool,
)
from rollwright.agents.tool_agent import ToolAgent
from rollwright.http.server import Listener, listening_socket
from rollwright.tools.calculator import calculator
from rollwright.tools.python import PythonSandbox
from rollwright.tools.search import Bm25Index, HttpSearch, Passage, search_tool
from rollwright.trajectory import TokenIds

PASSAGES = [
    Passage("The Aare is a river of 291 km, the longest that lies wholly in Switzerland.", "Aare"),
    Passage("The Rhine rises in the Alps and reaches the North Sea after 1,233 km.", "Rhine"),
]

SCRIPT = [
    [
        ("search", {"query": "length of the Rhine", "count": 1}),
        ("search", {"query": "length of the Aare", "count": 1}),
    ],
    [("python", {"code": "rhine, aare = 1233, 291"}), ("calculator", {"expression": "1233 / 291"})],
    [("pyton", {"code": "print(rhine - aare)"})],
    [("python", {"code": "print(rhine - aare)"})],
    [("submit", {"kilometres": 942})],
]
"""What the model calls, turn by turn; once it gets a name wrong and is told so."""


@tool(ends_episode=True)
async def submit(kilometres: int) -> int:
    """Hands in the answer.

    Args:
        kilometres: The difference of the two lengths.
    """
    return kilometres


@asynccontextmanager
async def search_server() -> AsyncIterator[str]:
    index = Bm25Index(PASSAGES)

    async def search(request: Request) -> JSONResponse:
        asked = await request.json()
        found = index.find(asked["query"], asked["count"])
        return JSONResponse({"results": [{"title": each.title, "text": each.text} for each in found]})

    server = Listener(Starlette(routes=[Route("/search", search, methods=["POST"])]))
    bound = listening_socket("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve([bound]))
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/search"
    server.stop()
    await serving


class ScriptRenderer(BytesRenderer):
    """Reads calls from the format of the script: JSON."""

    def parse(self, prompt: TokenIds, sampled: TokenIds, tools: Sequence[ToolSpec] = ()) -> Parsed:
        calls = json.loads(self.decode(sampled))
        named = [
            ToolCall(f"{len(prompt)}-{at}", name, json.dumps(given)) for at, (name, given) in enumerate(calls)
        ]
        return Parsed("", tool_calls=tuple(named))


class Script:
    """Plays the model's part."""

    renderer = ScriptRenderer()
    version = 0
    pressure = 0

    def __init__(self) -> None:
        self._lines = iter(SCRIPT)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        text = json.dumps(next(self._lines))
        ids = self.renderer.encode(text)
        return Generation(text, ids, floats([-1.0]) * len(ids), (VersionRun(0, len(ids)),))

    async def close(self) -> None:
        """Holds nothing."""


async def agent(task: dict[str, Any], session: Session) -> float:
    """Plays one task and returns its reward."""
    async with search_server() as url:
        search, python = HttpSearch(url), PythonSandbox()
        try:
            box = Toolbox([search_tool(search), python.tool(), calculator, submit])
            solution = await ToolAgent(box, "Use the tools.", max_turns=8).solve(session, task["question"])
            return float(solution.answer == task["answer"])
        finally:
            await python.close()
            await search.close()


async def main() -> None:
    trajectory = Trajectory("ro-1", "at-1", group_id="g", tag="tools", seed=0)
    session = Session(trajectory, Script(), Sampling(), ("ro-1",), sequence_length=8192, generate_timeout=60)
    task = {"question": "By how many kilometres is the Rhine longer than the Aare?", "answer": "942"}
    reward = await agent(task, session)
    for turn in trajectory.turns:
        print("model:", turn.text)
        for observation in json.loads(turn.outcome.observation) if turn.outcome else []:
            print("  tool:", observation)
    print("reward", reward)


if __name__ == "__main__":
    asyncio.run(main())
