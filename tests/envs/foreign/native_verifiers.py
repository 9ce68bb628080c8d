"""verifiers' own runner over scripted answers: what our rewards are compared with.

Everything is stock: its environment, interception server, client and scoring, and a provider on loopback that answers by rule.
The harness is a chat loop in this process, as its contract allows; `shipped` takes the `null` harness as it is, which starts
a program for each answer.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

sys.path.insert(0, str(Path(__file__).parent))

from scripted_answers import answer

__all__ = ["PlainHarness"]


class PlainHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(each) for each in prompt or ()]
        headers = {"Authorization": f"Bearer {secret}"}
        body = {"model": ctx.model, "messages": messages}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{endpoint}/chat/completions", json=body, headers=headers) as reply,
        ):
            await reply.read()
            return ProgramResult(0 if reply.status == 200 else 1, "", "")


async def complete(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    said = answer(asked["messages"])
    head = {"id": "chatcmpl-1", "created": 1, "model": asked["model"]}
    usage = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    if not asked.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    head["object"] = "chat.completion.chunk"
    delta = {"index": 0, "delta": {"role": "assistant", "content": said}, "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    events = [
        {**head, "choices": [delta]},
        {**head, "choices": [end]},
        {**head, "choices": [], "usage": usage},
    ]
    lines = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
    return web.Response(text=lines, content_type="text/event-stream")


async def main(order: dict[str, Any]) -> list[Any]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    taskset = order["taskset"]
    harness = {"id": "null" if order["shipped"] else "native_verifiers"}
    seat = {"harness": harness, "runtime": {"type": "subprocess"}, "max_turns": order["max_turns"]}
    seats = {
        name: seat
        for name, field in env_config_type(taskset["id"], "").model_fields.items()
        if isinstance(field.default, AgentConfig)
    }
    env = load_environment(resolve_env_config({"taskset": taskset, **seats}))
    client = EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="NO_KEY_IS_NEEDED")
    wanted = max(order["episodes"]) + 1
    tasks = [task for task, _ in zip(env.taskset, range(wanted), strict=False)]
    gate = asyncio.Semaphore(order["concurrent"])

    async def play(index: int) -> Any:
        async with gate:
            episode = await env.run_episode(tasks[index % len(tasks)], ModelContext("policy", client))
        (trace,) = episode.traces
        if not episode.ok:
            return [str(episode.last_error or trace.last_error)]
        rewards = {name: each.score for name, each in trace.rewards.items()}
        return [trace.reward, rewards, dict(trace.metrics), trace.stop_condition, trace.num_turns]

    async with env.serving():
        results = await asyncio.gather(*(play(index) for index in order["episodes"]))
    await runner.cleanup()
    return results


if __name__ == "__main__":
    told = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)
    if told["path"]:
        sys.path.insert(0, told["path"])
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    with os.fdopen(out, "w") as file:
        json.dump(asyncio.run(main(told)), file)
