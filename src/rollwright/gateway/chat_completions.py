"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from rollwright.engines.base import ToolSpec
from rollwright.gateway.types import (
    ModelReply,
    ModelRequest,
    Wishes,
    check_messages,
    decode,
    event,
    offered,
    refuse,
    refuse_options,
    sampling_options,
    text_of,
    tool_call,
)
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import FinishReason, Message

_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "functions": [],
    "audio": None,
    "prediction": None,
}
"""Options that cannot be honoured, and the value under which they do nothing."""

_SAMPLING: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
}
"""Settings that change the distribution, those that vLLM and SGLang add to the API included, and their neutral values."""

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    id: str
    function: _CalledFunction


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Request(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: Any = None
    n: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    top_k: Any = None
    min_p: Any = None
    functions: Any = None
    audio: Any = None
    prediction: Any = None


_DECODER = msgspec.json.Decoder(_Request)


class ChatCompletions:
    def read(self, body: bytes) -> ModelRequest:
        request: _Request = decode(_DECODER, body)
        refuse_options(request, _NEUTRAL)
        if isinstance(request.response_format, dict) and request.response_format.get("type") != "text":
            raise refuse("response_format: only text is supported; ask for JSON in the prompt")
        stop = request.stop or ()
        return ModelRequest(
            messages=check_messages(_message(place, each) for place, each in enumerate(request.messages)),
            model=request.model,
            tools=offered((_spec(tool.function) for tool in request.tools or ()), request.tool_choice),
            wishes=Wishes(
                temperature=request.temperature,
                top_p=request.top_p,
                max_tokens=request.max_completion_tokens or request.max_tokens,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                other=sampling_options(request, _SAMPLING),
            ),
            stream=bool(request.stream),
            stream_usage=request.stream_options is not None and request.stream_options.include_usage,
        )

    def present(self, message: Message) -> Message:
        return message

    def answer(self, asked: ModelRequest, reply: ModelReply) -> Mapping[str, Any]:
        said = reply.message
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["content"] = said.content or None
            message["tool_calls"] = _calls(said)
        choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": None}
        return {
            "id": f"chatcmpl-{reply.name}",
            "object": "chat.completion",
            "created": reply.created,
            "model": asked.model,
            "choices": [choice],
            "usage": _usage(reply),
        }

    def events(self, asked: ModelRequest, reply: ModelReply) -> Iterator[bytes]:
        said = reply.message

        def chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return event({**head, "choices": [choice]})

        head: dict[str, Any] = {
            "id": f"chatcmpl-{reply.name}",
            "object": "chat.completion.chunk",
            "created": reply.created,
            "model": asked.model,
        }
        if asked.stream_usage:
            head["usage"] = None
        yield chunk({"role": "assistant", "content": "" if said.content or not said.tool_calls else None})
        if said.reasoning:
            yield chunk({"reasoning_content": said.reasoning})
        if said.content:
            yield chunk({"content": said.content})
        for place, call in enumerate(_calls(said)):
            yield chunk({"tool_calls": [{"index": place, **call}]})
        yield chunk({}, _finish(reply))
        if asked.stream_usage:
            yield event({**head, "choices": [], "usage": _usage(reply)})
        yield event(b"[DONE]")

    def error(self, status: int, kind: str, message: str) -> Mapping[str, Any]:
        type = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": type, "param": None, "code": kind}}


def _message(place: int, given: _Message) -> Message:
    where = f"messages[{place}]"
    content = text_of(given.content, where)
    if given.role == "tool" and given.tool_call_id is None:
        raise HttpRefusal(422, "invalid", f"{where}: a tool message needs a tool_call_id")
    return Message(
        role="system" if given.role == "developer" else given.role,
        content=content,
        reasoning=given.reasoning_content or "",
        tool_calls=tuple(
            tool_call(call.id, call.function.name, call.function.arguments, where)
            for call in given.tool_calls or ()
        ),
        tool_call_id=given.tool_call_id,
        name=given.name if given.role == "tool" else None,
    )


def _spec(function: _Function) -> ToolSpec:
    if function.parameters is None:
        return ToolSpec(function.name, function.description or "")
    return ToolSpec(function.name, function.description or "", function.parameters)


def _calls(said: Message) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.tool_calls
    ]


def _finish(reply: ModelReply) -> str:
    if reply.finish is not FinishReason.STOP:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _usage(reply: ModelReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
