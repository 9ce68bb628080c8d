"""Request bodies, response bodies and a server's own words, as pure code."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines import Prompt, Sampling
from rollwright.engines.openai_api import ChatApi, CompletionsApi, TextApi, server_message
from rollwright.errors import ConfigError, FormatError
from rollwright.trajectory import FinishReason, Message

MESSAGES = [Message("system", "Play."), Message("user", "Board: ☃\n_P_G")]
PROMPT = Prompt(episode="e", key=("k",), messages=MESSAGES)
BOTH = [ChatApi("m"), CompletionsApi("m")]


def chat(content: Any, finish: str | None = "stop", **fields: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
    return json.dumps({"id": "x", "choices": [choice], **fields}).encode()


def test_a_chat_request_holds_the_messages_and_how_to_sample() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=77, stop=("END",))
    assert json.loads(ChatApi("m", {"min_p": 0.1}).request(PROMPT, sampling)) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Play."}, {"role": "user", "content": "Board: ☃\n_P_G"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 77,
        "stop": ["END"],
        "min_p": 0.1,
    }


def test_a_completions_request_holds_a_transcript_and_stops_before_the_users_turn() -> None:
    body = json.loads(CompletionsApi("m").request(PROMPT, Sampling(stop=("END",))))
    assert body["prompt"] == "system: Play.\n\nuser: Board: ☃\n_P_G\n\nassistant:"
    assert body["stop"] == ["END", "\n\nuser:"]
    assert "messages" not in body


def test_extra_fields_win_over_the_sampling_settings() -> None:
    body = json.loads(ChatApi("m", {"top_p": 0.5}).request(PROMPT, Sampling(top_p=1.0)))
    assert body["top_p"] == 0.5
    assert "stop" not in body


@pytest.mark.parametrize("api", [ChatApi, CompletionsApi])
@pytest.mark.parametrize("name", ["model", "messages", "prompt", "stream", "n"])
def test_extra_fields_cannot_replace_what_the_client_makes(api: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"extra_body\.{name}: cannot be set here; accepted"):
        api("m", {name: 1})


def test_a_chat_response_becomes_a_generation_that_is_not_exact() -> None:
    body = chat("<answer>Up</answer>", usage={"prompt_tokens": 12, "completion_tokens": 7, "other": {}})
    made = ChatApi("m").response(body)
    assert (made.text, made.prompt_tokens, made.completion_tokens) == ("<answer>Up</answer>", 12, 7)
    assert (made.exact, len(made.sampled_ids), made.versions) == (False, 0, ())


def test_a_text_response_becomes_a_generation() -> None:
    made = CompletionsApi("m").response(b'{"choices": [{"text": "hi", "finish_reason": "length"}]}')
    assert (made.text, made.finish, made.completion_tokens) == ("hi", FinishReason.LENGTH, 0)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("abort", FinishReason.ABORT),
        ("content_filter", FinishReason.ABORT),
        ("tool_calls", FinishReason.STOP),
        (None, FinishReason.STOP),
    ],
)
def test_finish_reasons_are_mapped(said: str | None, meant: FinishReason) -> None:
    assert ChatApi("m").response(chat("x", said)).finish is meant


def test_a_model_that_wrote_nothing_gives_an_empty_text() -> None:
    assert ChatApi("m").response(chat(None, usage=None)).text == ""


@pytest.mark.parametrize("api", BOTH, ids=lambda api: type(api).__name__)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"<html>hello</html>",
        b'{"choices": []}',
        b'{"choices": [{"index": 0}]}',
        b'{"choices": [{"message": {"content": 5}, "text": 5}]}',
        b'{"choices": [{"message": {"content": "\xff"}, "text": "\xff"}]}',
        b"[" * 100_000,
    ],
)
def test_a_body_without_a_completion_is_refused_in_one_line(api: TextApi, body: bytes) -> None:
    with pytest.raises(FormatError) as refusal:
        api.response(body)
    assert len(str(refusal.value).splitlines()) == 1
    assert len(str(refusal.value)) <= 301


@given(st.data())
def test_a_body_cut_anywhere_is_refused(data: st.DataObject) -> None:
    body = chat("some text", usage={"prompt_tokens": 1, "completion_tokens": 2})
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(FormatError):
        ChatApi("m").response(body[:cut])


def test_an_error_that_came_with_status_200_is_shown() -> None:
    with pytest.raises(FormatError, match="overloaded, try later"):
        ChatApi("m").response(b'{"error": {"message": "overloaded, try later", "code": 502}}')


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such model", "type": "x"}}', "no such model"),
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (b'{"detail": "Not authenticated"}', "Not authenticated"),
        (b'{"detail": [{"loc": ["body"], "msg": "missing"}]}', '[{"loc":["body"],"msg":"missing"}]'),
        (b'{"error": "bad"}', "bad"),
        (b"Bad\r\n  Gateway \xff", "Bad Gateway \ufffd"),
        (b"", ""),
        (b"x" * 1000, "x" * 300 + "…"),
    ],
)
def test_a_servers_own_words_are_found(body: bytes, message: str) -> None:
    assert server_message(body) == message


@given(st.binary(max_size=60))
def test_whatever_a_server_says_becomes_one_short_line(body: bytes) -> None:
    message = server_message(body)
    assert len(message.splitlines()) <= 1
    assert len(message) <= 301
