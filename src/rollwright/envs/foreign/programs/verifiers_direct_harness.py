"""verifiers' `null` harness without HTTP: the same conversation, tools and record, each answer asked of the run directly.

Always true: what a model call does to a rollout is what verifiers' interception server does: limits and stops are looked at
before it, the turn is committed to the trace behind it, and the call is recorded. Tasks that look at or rewrite single requests
and responses (`@intercept`, or `@stop` on them) are not played this way.
"""

import json
import time
from contextlib import AsyncExitStack
from typing import Any

from verifiers.v1 import graph
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import HarnessError, model_error
from verifiers.v1.harnesses.null.harness import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.session import RolloutSession
from verifiers_chat_harness import connect_tools, opening
from verifiers_playing import PLAYING, PlayingServer, agent_name

__all__ = ["DirectHarness"]

_DIALECT = ChatDialect()
_OVERFLOW = "context_length_exceeded"


class DirectHarnessConfig(NullHarnessConfig):
    pass


class Stopped(Exception):
    """A limit or a `@stop` of the task has ended the rollout, or the conversation is full."""


class DirectHarness(NullHarness):
    """The `null` harness."""

    SUPPORTS_TOOL_INTERCEPTION = False

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
    ) -> ProgramResult:
        session = PlayingServer.current.sessions[secret]
        messages = opening(*self.resolve_prompt(data))
        try:
            if mcp_urls:
                async with AsyncExitStack() as stack:
                    tools, dispatch, servers = await connect_tools(self.config, mcp_urls, stack)
                    while await _call(session, messages, tools):
                        await _use_tools(messages, dispatch, servers)
            else:
                while await _call(session, messages, []):
                    await _use_tools(messages, {}, {})
        except Stopped:
            pass
        return ProgramResult(0, "", "")


async def _call(session: RolloutSession, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
    """Adds the model's answer to the messages; returns whether it calls tools."""
    if session.released or session.stopped or await session.refused() is not None:
        raise Stopped
    body: dict[str, Any] = {"messages": messages}
    if tools:
        body["tools"] = tools
    body = _DIALECT.apply_overrides(body, session.ctx.model, session.ctx.sampling)
    request = _DIALECT.parse_request(body)
    turn = graph.prepare_turn(session.trace, request.messages, request.tools)
    if session.on_turn_input is not None:
        on_input, session.on_turn_input = session.on_turn_input, None
        on_input()
    started, node, response, error = time.time(), None, None, None
    session.error = None
    try:
        raw = await _ask(session, body)
        response = _DIALECT.parse_response(_DIALECT.validate_response(raw))
        response.raw = raw
        node = turn.commit(response)
    except BaseException as raised:
        error = raised
        raise
    finally:
        if node is None:
            turn.abandon()
        PlayingServer.current.record_call(
            session,
            _DIALECT,
            body,
            started,
            node=node,
            finish_reason=response.finish_reason if response else None,
            usage=response.usage if response else None,
            error=error,
        )
    said = {name: value for name, value in raw["choices"][0]["message"].items() if value is not None}
    messages.append(said)
    return bool(said.get("tool_calls"))


async def _ask(session: RolloutSession, body: dict[str, Any]) -> dict[str, Any]:
    answer = await PLAYING.get().ask({"body": json.dumps(body), "agent": agent_name(session)})
    said: dict[str, Any] = json.loads(answer["body"])
    if answer["status"] == 200:
        return said
    message, code = said["error"]["message"], said["error"]["code"]
    if code == _OVERFLOW:
        raise Stopped  # a full conversation ends a rollout, which is then scored as it is
    session.error = model_error(f"upstream {answer['status']}: {message}", status_code=answer["status"])
    raise HarnessError(message)


async def _use_tools(messages: list[dict[str, Any]], dispatch: Any, servers: Any) -> None:
    """Answers the calls of the last message, in verifiers' own words for what is wrong with one."""
    for call in messages[-1]["tool_calls"]:
        name = call["function"]["name"]
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except json.JSONDecodeError as error:
            content: Any = f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        else:
            if not isinstance(arguments, dict):
                content = (
                    f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; "
                    "resend as an object"
                )
            elif name in dispatch:
                content = await call_mcp(servers, dispatch, name, arguments)
            else:
                content = f"error: unknown tool {name!r}"
        told = {"role": "tool", "tool_call_id": call["id"], "content": content, "name": name}
        messages.append(bound_tool_message(told))
