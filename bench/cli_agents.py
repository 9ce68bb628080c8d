"""CPU time that the gateway takes for a call of Claude Code, whose prompt has about 20,000 tokens.

Claude Code itself is run once, in a box over a scripted engine, and its request is kept: its own system prompt, tools and first
messages. Then agents of this program send that request and go on from the answers as Claude Code does, each call with one
tool's answer more. The gateway runs in a process of its own, whose CPU time is read there; its policy answers at once, with the
ids of a tool call, in the format of Qwen3 and the vocabulary of SmolLM2.

Reported for each call: all CPU time of the gateway, its HTTP server included; that of the same calls with a short prompt and
one tool; and what rendering and tokenizing the new messages alone takes. The first call of a rollout, which tokenizes the whole
prompt, is reported apart. The arms are played in turns.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from results_file import write_results

ROOT = Path(__file__).resolve().parents[1]
GOAL_MS = 1.0
CALLS = 40
"""Calls of one rollout behind the first."""
PROMPT_TOKENS = 20_000
"""Tokens of the first prompt; Claude Code's own of about 12,000 is filled up by a user's notes, as a project brings them."""
NOTES = "- Tests of the package in src/part_{number}.py are in tests/test_part_{number}.py; run them before each commit.\n"
SPECIAL = "<|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls -la", "description": "List"}}\n</tool_call><|im_end|>'
RESULT = "drwxr-xr-x 2 root root 4096 Nov 18 10:00 part-{number}\n" * 10
SHORT: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 1000,
    "stream": True,
    "system": "You help.",
    "messages": [{"role": "user", "content": "List the files."}],
    "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object", "properties": {}}}],
}


def record_request() -> dict[str, Any]:
    """The first request of Claude Code for the example's task."""
    from rollwright.config import load
    from rollwright.gateway import endpoint
    from rollwright.run.run import Run

    api, bodies = endpoint._APIS["messages",], []

    class Keeping(type(api)):  # type: ignore[misc]
        def read(self, body: bytes) -> Any:
            bodies.append(body)
            return super().read(body)

    async def play() -> None:
        config = load(ROOT / "examples" / "cli_agents" / "claude_code.yaml")
        async with Run(config) as run:
            await run.get_batch()

    endpoint._APIS["messages",] = Keeping()
    asyncio.run(play())
    request: dict[str, Any] = json.loads(bodies[0])
    return request


def filled_up(request: dict[str, Any]) -> dict[str, Any]:
    """The request with notes of the user in front, so that its prompt has `PROMPT_TOKENS`."""
    from rollwright.gateway.anthropic_messages import AnthropicMessages

    renderer, notes = InstantPolicy().renderer, ""
    while True:
        message = {"role": "user", "content": notes}
        made = {**request, "messages": [*([message] if notes else []), *request["messages"]]}
        asked = AnthropicMessages().read(json.dumps(made).encode())
        missing = PROMPT_TOKENS - len(renderer.open(asked.messages, asked.tools))
        if missing <= 0:
            return made
        count = len(notes.splitlines())
        lines = range(count, count + max(1, missing // 40))
        notes += "".join(NOTES.format(number=number) for number in lines)


@cache
def vocabulary() -> Any:
    from rollwright.models import load_tokenizer

    made = load_tokenizer("smollm2")
    made.unk_token = None  # it is `<|endoftext|>`, which the renderer looks for
    made.add_tokens(SPECIAL.split(), special_tokens=True)
    return made


class InstantPolicy:
    """Calls a tool, at once."""

    version = 0
    pressure = 0

    def __init__(self) -> None:
        from rollwright.engines.rendering import make_renderer
        from rollwright.trajectory import token_ids

        self.renderer = make_renderer(vocabulary(), "qwen3")
        self._ids = token_ids(vocabulary().encode(CALL, add_special_tokens=False))

    async def generate(self, prompt: Any, sampling: Any) -> Any:
        from rollwright.engines.base import Generation
        from rollwright.trajectory import FinishReason, VersionRun, floats

        count = len(self._ids)
        return Generation(
            "",
            self._ids[:],
            floats([-0.1]) * count,
            (VersionRun(0, count),),
            FinishReason.STOP,
            completion_tokens=count,
        )

    async def close(self) -> None: ...


async def serve() -> None:
    """The gateway's process: a line on its input opens a rollout, and tells the CPU time so far."""
    from rollwright.agents import Session
    from rollwright.engines.base import Sampling
    from rollwright.gateway import Gateway, RolloutRecorder
    from rollwright.trajectory import Trajectory

    gateway, policy = Gateway(), InstantPolicy()
    loop = asyncio.get_running_loop()
    number = 0
    recorder = None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        told: dict[str, Any] = {"cpu": time.process_time()}
        if line.strip() == "open":
            number += 1
            trajectory = Trajectory(f"ro-{number}", "at", "g", "bench", 0)
            session = Session(
                trajectory,
                policy,
                Sampling(max_tokens=256),
                (number,),
                sequence_length=200_000,
                generate_timeout=60.0,
            )
            recorder = RolloutRecorder(session, session.sampling)
            access = gateway.open(recorder)
            told |= {"url": access.base_url, "key": access.api_key}
        elif recorder is not None:
            turns = recorder.session.trajectory.turns
            told |= {
                "sequences": sum(turn.extends is None for turn in turns),
                "prompt": [turn.prompt_tokens for turn in turns],
                "metrics": recorder.session.trajectory.metrics,
            }
        print(json.dumps(told), flush=True)


class Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def play(server: Server, request: dict[str, Any], calls: int) -> dict[str, float]:
    """One rollout: CPU milliseconds of its first call, and of each later one."""
    place = server.ask("open")
    body = {**request, "messages": list(request["messages"])}
    times = [place["cpu"]]
    headers = {"x-api-key": place["key"], "content-type": "application/json"}
    with httpx.Client(headers=headers, timeout=60) as http:
        for number in range(calls + 1):
            told = http.post(f"{place['url']}/messages", content=json.dumps({**body, "stream": False}))
            blocks = told.raise_for_status().json()["content"]
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT.format(number=number)}
                for block in blocks
                if block["type"] == "tool_use"
            ]
            assert results, blocks
            body["messages"] += [
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": results},
            ]
            if number in (0, calls):
                ended = server.ask("time")
                times.append(ended["cpu"])
    assert ended["sequences"] == 1, ended["metrics"]
    first, rest = times[1] - times[0], times[2] - times[1]
    return {"first": 1000 * first, "later": 1000 * rest / calls, "prompt": ended["prompt"][0]}


def tokenizing_ms() -> float:
    """CPU milliseconds to render and tokenize what a later call adds, behind a prompt of one message without tools."""
    from rollwright.trajectory import FinishReason, Message, token_ids

    renderer = InstantPolicy().renderer
    sampled = token_ids(vocabulary().encode(CALL, add_special_tokens=False))
    prompt = renderer.open([Message("user", "List the files.")])
    new = [Message("tool", RESULT.format(number=7), tool_call_id="call_0_0", name="Bash")]
    count = 200
    began = time.process_time()
    for _ in range(count):
        renderer.extend(prompt, sampled, FinishReason.STOP, new)
    return 1000 * (time.process_time() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--request", type=Path, help="a request that was kept before")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    if options.request is not None and options.request.exists():
        request = json.loads(options.request.read_text())
    else:
        request = record_request()
        if options.request is not None:
            options.request.write_text(json.dumps(request))
    own, request = request, filled_up(request)
    server = Server()
    try:
        play(server, SHORT, 10)  # imports and caches of the process
        play(server, request, 10)
        played: dict[str, list[dict[str, float]]] = {"short": [], "own": [], "claude": []}
        tokenized = []
        for _ in range(options.rounds):
            played["short"].append(play(server, SHORT, CALLS))
            played["own"].append(play(server, own, CALLS))
            played["claude"].append(play(server, request, CALLS))
            tokenized.append(tokenizing_ms())
    finally:
        server.close()
    new = median(tokenized)
    later = median(each["later"] for each in played["claude"])
    figures = {
        "prompt_tokens": int(played["claude"][0]["prompt"]),
        "own_prompt_tokens": int(played["own"][0]["prompt"]),
        "own_prompt_call_ms": round(median(each["later"] for each in played["own"]), 3),
        "request_kb": round(len(json.dumps(request)) / 1000, 1),
        "calls": options.rounds * CALLS,
        "first_call_ms": round(median(each["first"] for each in played["claude"]), 2),
        "call_ms": round(later, 3),
        "short_prompt_call_ms": round(median(each["later"] for each in played["short"]), 3),
        "tokenizing_the_new_ms": round(new, 3),
        "added_ms": round(later - new, 3),
        "goal_ms": GOAL_MS,
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(figures, indent=2))
    print(write_results("cli_agents", figures))


if __name__ == "__main__":
    main()
