"""OpenAI's legacy completions: `POST /v1/completions`, with the prompt as the user's message.

The policy speaks a chat format, so a prompt is asked as a question and not continued as text. `echo` and `suffix`, which only
make sense for a continued text, are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rollwright.gateway.chat_completions import ChatCompletions, CompletionRequest, finish_of, usage_of
from rollwright.gateway.types import (
    ModelReply,
    ModelRequest,
    check_messages,
    decode,
    event,
    refuse,
    refuse_options,
)
from rollwright.trajectory import Message

_NEUTRAL: dict[str, Any] = {"echo": False, "suffix": ""}
"""Options that cannot be honoured, and the value under which they do nothing."""


class _Request(CompletionRequest, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: Any = None
    suffix: Any = None


_DECODER = msgspec.json.Decoder(_Request)


class LegacyCompletions:
    def read(self, body: bytes) -> ModelRequest:
        request: _Request = decode(_DECODER, body)
        refuse_options(request, _NEUTRAL)
        prompt = request.prompt
        if isinstance(prompt, list):
            if len(prompt) != 1 or not isinstance(prompt[0], str):
                raise refuse("prompt: accepted is one text; send several in requests of their own")
            prompt = prompt[0]
        return ModelRequest(
            messages=check_messages([Message("user", prompt)]),
            model=request.model,
            wishes=request.wishes(request.max_tokens),
            stream=bool(request.stream),
            stream_usage=request.stream_usage,
            choices=request.n or 1,
            logprobs=request.logprobs is not None,
        )

    def read_to_count(self, body: bytes) -> ModelRequest:
        return self.read(body)

    def answer_count(self, tokens: int) -> Mapping[str, Any]:
        return {"input_tokens": tokens}

    def present(self, asked: ModelRequest, message: Message) -> Message:
        return message

    def answer(self, asked: ModelRequest, reply: ModelReply) -> Mapping[str, Any]:
        choices = [_choice(asked, each, place) for place, each in enumerate(reply.all)]
        return {**_head(asked, reply), "choices": choices, "usage": usage_of(reply)}

    def events(self, asked: ModelRequest, reply: ModelReply) -> Iterator[bytes]:
        for place, each in enumerate(reply.all):
            yield event({**_head(asked, reply), "choices": [_choice(asked, each, place)]})
        if asked.stream_usage:
            yield event({**_head(asked, reply), "choices": [], "usage": usage_of(reply)})
        yield event(b"[DONE]")

    error = ChatCompletions.error


def _head(asked: ModelRequest, reply: ModelReply) -> dict[str, Any]:
    return {
        "id": f"cmpl-{reply.name}",
        "object": "text_completion",
        "created": reply.created,
        "model": asked.model,
    }


def _choice(asked: ModelRequest, reply: ModelReply, place: int) -> dict[str, Any]:
    finish = finish_of(reply)
    return {
        "index": place,
        "text": reply.message.content,
        "finish_reason": "stop" if finish == "tool_calls" else finish,
        "logprobs": _logprobs(reply) if asked.logprobs else None,
    }


def _logprobs(reply: ModelReply) -> dict[str, Any]:
    offsets, length = [], 0
    for token in reply.tokens:
        offsets.append(length)
        length += len(token.text)
    return {
        "tokens": [each.text for each in reply.tokens],
        "token_logprobs": [each.logprob for each in reply.tokens],
        "top_logprobs": [{each.text: each.logprob} for each in reply.tokens],
        "text_offset": offsets,
    }
