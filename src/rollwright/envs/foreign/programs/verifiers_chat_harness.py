"""verifiers' `null` harness in this process: its own chat loop, without a Python process for each rollout.

verifiers starts the loop as a program of its own, which costs one to two seconds of CPU for its imports; its contract for
harnesses allows a loop in process, as long as every model call goes to the endpoint with the secret. The program asks for
streams and puts them together again; here an answer comes whole, because nobody waits for its parts.
"""

import argparse
import json
import traceback
import types
from contextlib import AsyncExitStack
from typing import Any

import httpx
from openai import APIConnectionError, AsyncOpenAI
from openai.types.chat import ChatCompletion
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.harnesses.utils.mcp import connect_mcp
from verifiers.v1.runtimes import ProgramResult
from verifiers_playing import PlayingServer

__all__ = ["ChatHarness"]

PROGRAM = types.ModuleType("verifiers_chat_program")
"""The program of the `null` harness, as verifiers starts it."""

exec(compile(CHAT_PROGRAM_SOURCE, PROGRAM.__name__, "exec"), PROGRAM.__dict__)  # noqa: S102 - it is verifiers' own text, which exists in no file


_RETRIED = (408, 409, 429)
"""What the SDK tries again, beside errors of the server."""


async def complete(
    client: AsyncOpenAI,
    model: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    *,
    tool_choice: str | None = None,
) -> Any:
    """One answer of the model, as the program's `chat` returns it. What can be tried again is left to the SDK."""
    asked: dict[str, Any] = {"model": model, "messages": messages}
    if tools:
        asked["tools"] = tools
        if tool_choice is not None:
            asked["tool_choice"] = tool_choice
    body = json.dumps(asked).encode()
    status, answer = await PlayingServer.current.complete(client.api_key, body)
    if status == 200:
        return ChatCompletion.construct(**json.loads(answer))
    if status not in _RETRIED and status < 500:
        request = httpx.Request("POST", str(client.base_url))
        response: Any = httpx.Response(status, content=answer, request=request)
        raise client._make_status_error_from_response(response)
    try:
        return await client.chat.completions.create(**asked)
    except APIConnectionError as error:
        traceback.print_exc()
        raise SystemExit(PROGRAM.MODEL_TRANSPORT_ERROR_EXIT_CODE) from error


PROGRAM.chat = complete  # type: ignore[attr-defined]


class ChatHarnessConfig(NullHarnessConfig):
    pass


class ChatHarness(NullHarness):
    """The `null` harness; the loop is verifiers' own."""

    async def setup(self, runtime: Any) -> None:
        """Nothing is installed."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        try:
            await self._run(ctx, endpoint, secret, mcp_urls, opening(system, prompt), tool_interception_url)
        except SystemExit as left:
            return ProgramResult(int(left.code or 0), "", traceback.format_exc())
        except Exception:  # noqa: BLE001 - a program would end with its traceback
            return ProgramResult(1, "", traceback.format_exc())
        return ProgramResult(0, "", "")

    async def _run(
        self,
        ctx: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        messages: list[dict[str, Any]],
        tool_interception_url: str | None,
    ) -> None:
        pool = PlayingServer.current.pool
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=pool, timeout=None)
        args = argparse.Namespace(
            base_url=endpoint,
            api_key=secret,
            model=ctx.model,
            tool_interception_url=tool_interception_url or "",
            bash=False,
            edit=False,
            search=False,
            serper_key="",
        )
        async with AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_tools(self.config, mcp_urls, stack)
            compactor = PROGRAM.Compactor(client, ctx.model, tools, False, None)
            compactor.note_good(messages)
            await PROGRAM.run_chat_loop(args, compactor, messages, dispatch, servers, pool)


def opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """The messages before the first answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    else:
        messages.extend(message_to_wire(each) for each in prompt or ())
    return messages


async def connect_tools(config: Any, mcp_urls: dict[str, str], stack: AsyncExitStack) -> tuple[Any, Any, Any]:
    """The tools of a rollout's servers, as the program connects to them."""
    if not mcp_urls:
        return [], {}, {}
    servers = {name: {"url": url, "timeout": config.tool_timeout} for name, url in mcp_urls.items()}
    return await connect_mcp({"mcpServers": servers}, stack)
