"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from rollwright.engines.base import OfferedTools, ToolSpec
from rollwright.gateway.types import (
    ModelReply,
    ModelRequest,
    ReadTools,
    TokenLogprob,
    Wishes,
    check_messages,
    choose_tools,
    decode,
    event,
    keep_read,
    output_format,
    passed_over,
    refuse_options,
    sampling_options,
    text_of,
    tool_call,
)
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import FinishReason, Message

MAX_CHOICES = 128
"""Answers to one request, as in the hosted API."""

_NEUTRAL: dict[str, Any] = {
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
    function: _Function | None = None
    type: str = "function"


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


class CompletionRequest(msgspec.Struct, kw_only=True):
    """What chat completions and legacy completions have in common."""

    model: str = ""
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    top_k: Any = None
    min_p: Any = None

    def wishes(self, max_tokens: int | None) -> Wishes:
        stop = self.stop or ()
        return Wishes(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            other=sampling_options(self, _SAMPLING),
        )

    @property
    def stream_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class _Request(CompletionRequest, kw_only=True):
    messages: list[_Message]
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: Any = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    response_format: Any = None
    logprobs: bool | None = None
    functions: Any = None
    audio: Any = None
    prediction: Any = None


_DECODER = msgspec.json.Decoder(_Request)
_TOOLS = msgspec.json.Decoder(list[_Tool] | None)


@keep_read
def _read_tools(raw: bytes) -> ReadTools:
    """The client's functions, and the kinds of tools that are none."""
    given: list[_Tool] = decode(_TOOLS, raw) or []
    specs = OfferedTools(_spec(tool.function) for tool in given if tool.function is not None)
    return ReadTools(specs, tuple(tool.type for tool in given if tool.function is None))


class ChatCompletions:
    def read(self, body: bytes) -> ModelRequest:
        request: _Request = decode(_DECODER, body)
        refuse_options(request, _NEUTRAL)
        specs, theirs = _read_tools(bytes(request.tools))
        tools, forced = choose_tools(specs, request.tool_choice)
        return ModelRequest(
            messages=check_messages(_message(place, each) for place, each in enumerate(request.messages)),
            model=request.model,
            tools=tools,
            wishes=request.wishes(request.max_completion_tokens or request.max_tokens),
            stream=bool(request.stream),
            stream_usage=request.stream_usage,
            output=forced or output_format(request.response_format, tools, "response_format"),
            choices=request.n or 1,
            logprobs=bool(request.logprobs),
            notes=passed_over(theirs),
        )

    def read_to_count(self, body: bytes) -> ModelRequest:
        return self.read(body)

    def answer_count(self, tokens: int) -> Mapping[str, Any]:
        return {"input_tokens": tokens}

    def present(self, asked: ModelRequest, message: Message) -> Message:
        return message

    def answer(self, asked: ModelRequest, reply: ModelReply) -> Mapping[str, Any]:
        return {
            "id": f"chatcmpl-{reply.name}",
            "object": "chat.completion",
            "created": reply.created,
            "model": asked.model,
            "choices": [_choice(asked, each, place) for place, each in enumerate(reply.all)],
            "usage": usage_of(reply),
        }

    def events(self, asked: ModelRequest, reply: ModelReply) -> Iterator[bytes]:
        head: dict[str, Any] = {
            "id": f"chatcmpl-{reply.name}",
            "object": "chat.completion.chunk",
            "created": reply.created,
            "model": asked.model,
        }
        if asked.stream_usage:
            head["usage"] = None
        for place, each in enumerate(reply.all):
            for choice in _chunks(asked, each, place):
                yield event({**head, "choices": [choice]})
        if asked.stream_usage:
            yield event({**head, "choices": [], "usage": usage_of(reply)})
        yield event(b"[DONE]")

    def error(self, status: int, kind: str, message: str) -> Mapping[str, Any]:
        type = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": type, "param": None, "code": kind}}


def _choice(asked: ModelRequest, reply: ModelReply, place: int) -> dict[str, Any]:
    said = reply.message
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["content"] = said.content or None
        message["tool_calls"] = _calls(said)
    logprobs = _logprobs(reply) if asked.logprobs else None
    return {"index": place, "message": message, "finish_reason": finish_of(reply), "logprobs": logprobs}


def _chunks(asked: ModelRequest, reply: ModelReply, place: int) -> Iterator[dict[str, Any]]:
    """One choice of a stream, part by part; the log-probabilities come with the first."""
    said = reply.message
    logprobs = _logprobs(reply) if asked.logprobs else None

    def chunk(delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return {"index": place, "delta": delta, "finish_reason": finish, "logprobs": logprobs}

    opening = {"role": "assistant", "content": "" if said.content or not said.tool_calls else None}
    yield chunk(opening, logprobs=logprobs)
    if said.reasoning:
        yield chunk({"reasoning_content": said.reasoning})
    if said.content:
        yield chunk({"content": said.content})
    for number, call in enumerate(_calls(said)):
        yield chunk({"tool_calls": [{"index": number, **call}]})
    yield chunk({}, finish_of(reply))


def _logprobs(reply: ModelReply) -> dict[str, Any]:
    return {"content": [token_logprob(each) for each in reply.tokens], "refusal": None}


def token_logprob(token: TokenLogprob) -> dict[str, Any]:
    """A token in OpenAI's words. Engines are asked for the sampled token alone, so it is its only alternative."""
    said = {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode())}
    return {**said, "top_logprobs": [said]}


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


def finish_of(reply: ModelReply) -> str:
    if reply.finish is not FinishReason.STOP:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def usage_of(reply: ModelReply) -> dict[str, int]:
    """Token counts of a reply; the prompt counts once, however many answers it got."""
    made = sum(each.completion_tokens for each in reply.all)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": reply.prompt_tokens + made,
    }
