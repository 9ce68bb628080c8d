"""Agents of many frameworks, each from its own package in an environment of its own: `make test-clients`.

A program under `programs/` is given an address and a key by the variables that its SDK reads, and knows nothing of what is
behind them. It has to end well, nothing that it asked for may be refused, and what was recorded is what the engine made.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "bench"))

BASH: list[dict[str, Any]] = [
    {"call": {"name": "bash", "arguments": {"command": "echo lisbon"}}},
    {"call": {"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}},
]
JSON: list[dict[str, Any]] = [{"json": {"city": "Lisbon", "degrees": 21, "reasoning": "easy", "answer": "4"}}]
SMOL: list[dict[str, Any]] = [
    {"task": "in code", "replies": [{"say": "Thought: easy.\n<code>\nfinal_answer('hello')\n</code>"}]},
    {
        "task": "weather",
        "replies": [
            {"call": {"name": "get_weather", "arguments": {"city": "Lisbon"}}},
            {"call": {"name": "final_answer", "arguments": {"answer": "21 degrees"}}},
        ],
    },
]


class Client(NamedTuple):
    """One program, what it needs, and what it must lead to."""

    packages: tuple[str, ...]
    sequences: int
    says: str
    script: list[dict[str, Any]] | None = None


CLIENTS = {
    "smolagents_tools": Client(("smolagents[openai]==1.26.0",), 3, "Final answer: 21 degrees", SMOL),
    "instructor_modes": Client(("instructor==1.17.0",), 4, "degrees=", JSON),
    "litellm_calls": Client(("litellm==1.106.2", "mcp==2.3.0"), 6, "get_weather"),
    "dspy_thought": Client(("dspy==3.4.1",), 1, "reasoning=", JSON),
    "autogen_agent": Client(("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"), 3, "city="),
    "llama_index_agent": Client(
        ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"), 2, "degrees="
    ),
    "crewai_crew": Client(("crewai==1.15.30",), 1, "city="),
    "mini_swe_agent": Client(
        ("mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp==2.3.0"), 1, "Submitted", BASH
    ),
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_is_served_whatever_it_asks_for(
    name: str, make_recorded: Any, run_program: Any, tmp_path: Path
) -> None:
    from venvs import peer_python

    client = CLIENTS[name]
    python = await asyncio.to_thread(peer_python, f"client-{name.partition('_')[0]}", client.packages)
    recorded = make_recorded(client.script)
    program = str(HERE / "programs" / f"{name}.py")
    said = await run_program([str(python), program], recorded, tmp_path)
    assert client.says in said
    recorded.assert_served(client.sequences)
