"""A foreign package that plays whole episodes, and does everything that one should not."""

import asyncio
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

made = 0


class Loop:
    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def reset(self, seed: int) -> dict[str, Any]:
        print("{ garbage on standard output")
        return {"observation": f"question {seed}", "task": {"seed": seed, "pid": os.getpid(), "made": made}}

    async def play(self, seed: int, base_url: str, api_key: str, ask: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"question {seed}"}]
        said = ""
        for turn in range(self._turns):
            body = json.dumps({"model": "policy", "messages": messages})
            if base_url:
                said = await asyncio.to_thread(_post, base_url, api_key, body)
            else:
                answer = await ask({"body": body, "agent": "player"})
                if answer["status"] != 200:
                    raise RuntimeError(
                        f"{answer['status']}: {json.loads(answer['body'])['error']['message']}"
                    )
                said = json.loads(answer["body"])["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {turn}"}]
        await _misbehave(seed)
        right = float(f"question {seed}" in said)
        return {"reward": right, "components": {"right": right}, "metrics": {"letters": len(said)}}

    async def close(self) -> None:
        if mark := os.environ.get("EPISODE_PROGRAM_MARK"):
            Path(mark).write_text("closed")  # noqa: ASYNC240


async def _misbehave(seed: int) -> None:
    match seed:
        case 666:
            print("last words", file=sys.stderr, flush=True)
            os.abort()
        case 667:
            time.sleep(3600)  # noqa: ASYNC251
        case 668:
            await asyncio.Event().wait()
        case 669:
            sys.exit("I leave")
        case 670:
            raise LookupError("no such\nthing")


def _post(base_url: str, api_key: str, body: str) -> str:
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body.encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


async def make(turns: int) -> Loop:
    global made
    made += 1
    await asyncio.sleep(0)
    return Loop(turns)


def describe(turns: int) -> dict[str, int]:
    return {"turns": turns}
