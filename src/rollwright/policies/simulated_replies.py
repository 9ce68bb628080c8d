"""What the simulated server says: completions of chat, text and token ids, and refusals, as bytes of HTTP.

Pure: a request and what was drawn for it in, a reply out.
"""

from typing import Annotated, Any, NamedTuple

import msgspec

from rollwright.policies.http_requests import Request
from rollwright.policies.simulated_vllm import SimulatedWeights, token_choice

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

_REASONS = {200: "OK", 429: "Too Many Requests", 500: "Internal Server Error"}


class _Message(msgspec.Struct):
    role: str
    content: str


class _Body(msgspec.Struct):
    model: str = "simulated"
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool = False


class _ChatBody(_Body, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]


class _TextBody(_Body, kw_only=True):
    prompt: str | list[int]
    temperature: float = 1.0


_decode_chat = msgspec.json.Decoder(_ChatBody).decode
_decode_text = msgspec.json.Decoder(_TextBody).decode
encode = msgspec.json.Encoder().encode


class HttpReply(NamedTuple):
    status: int
    body: bytes
    headers: bytes = b""

    def to_bytes(self, keep_alive: bool) -> bytes:
        return b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b%b\r\n%b" % (
            self.status,
            _REASONS.get(self.status, "Refused").encode(),
            len(self.body),
            self.headers,
            b"" if keep_alive else b"Connection: close\r\n",
            self.body,
        )


def completion(
    request: Request, number: int, text: str, share: float, weights: SimulatedWeights, raw_logprobs: bool
) -> HttpReply:
    """The answer to a good request, or the refusal of a bad one."""
    chat = request.path == CHAT
    try:
        body = _decode_chat(request.body) if chat else _decode_text(request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as mistake:
        return error(400, f"the body is not a completion request: {mistake}")
    if body.stream:
        return error(400, "streaming is not supported")
    if isinstance(body, _ChatBody):
        prompt_tokens = sum(len(message.content.encode()) for message in body.messages)
        choice, tokens = _text_choice(text, body.max_tokens)
        choice = {**choice, "message": {"role": "assistant", "content": choice.pop("text")}}
    elif isinstance(body.prompt, str):
        prompt_tokens = len(body.prompt.encode())
        choice, tokens = _text_choice(text, body.max_tokens)
    else:
        prompt_tokens = len(body.prompt)
        temperature = 1.0 if raw_logprobs else body.temperature
        choice = token_choice(body.prompt, text, body.max_tokens, share, weights.loads, temperature)
        tokens = len(choice["token_ids"])
    answer = {
        "id": f"simulated-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": body.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        },
    }
    return HttpReply(200, encode(answer))


def _text_choice(text: str, max_tokens: int | None) -> tuple[dict[str, Any], int]:
    """A completion of text, and how many tokens it has."""
    tokens = text.encode()
    finish = "stop"
    if max_tokens is not None and max_tokens < len(tokens):
        tokens = tokens[:max_tokens]
        text = tokens.decode(errors="replace")
        finish = "length"
    return {"index": 0, "finish_reason": finish, "text": text}, len(tokens)


def error(status: int, message: str, headers: str = "") -> HttpReply:
    return HttpReply(status, encode({"error": {"message": message, "code": status}}), headers.encode())
