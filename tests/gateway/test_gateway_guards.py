"""Who may call what, and what a client is told when it may not: one line, in the form its SDK reads."""

import asyncio
from typing import Any

import aiohttp
import pytest

from rollwright.agents import EpisodeFailure
from rollwright.agents.journal import JournalEntry
from rollwright.gateway import Gateway
from rollwright.store.errors import StoreUnavailable

CHAT = {"model": "m", "messages": [{"role": "user", "content": "one"}]}


async def post(
    url: str, key: str | None, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and decoded answer of one request, without any SDK in between."""
    given = {} if key is None else {"Authorization": f"Bearer {key}"}
    content = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with (
        aiohttp.ClientSession() as client,
        client.post(url, headers={**given, **(headers or {})}, **content) as answer,
    ):
        return answer.status, await answer.json(content_type=None)


@pytest.mark.parametrize("key", [None, "", "rw-wrong"])
async def test_an_unknown_key_is_refused(key: str | None, played: Any, engine: Any) -> None:
    status, answer = await post(f"{played.access.base_url}/chat/completions", key, CHAT)
    assert status == 401
    assert "key" in answer["error"]["message"]
    assert not engine.made


async def test_sdks_raise_their_own_errors(clients: Any, played: Any) -> None:
    import anthropic
    import openai

    wrong = played.access._replace(api_key="rw-wrong")
    async with clients.openai(wrong) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**CHAT)
    async with clients.anthropic(wrong) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(max_tokens=10, **CHAT)
    async with clients.openai(played.access) as client:
        with pytest.raises(openai.NotFoundError, match="is not served"):
            await client.embeddings.create(model="m", input="x")
        with pytest.raises(openai.BadRequestError, match=r"functions=.* is not supported"):
            await client.chat.completions.create(**CHAT, functions=[{"name": "f"}])


async def test_one_rollouts_key_opens_no_other(clients: Any, gateway: Gateway, engine: Any) -> None:
    one, other = (clients.rollout(gateway, engine, f"ro-{number}") for number in (1, 2))
    assert one.access.api_key != other.access.api_key
    status, _ = await post(f"{one.access.base_url}/chat/completions", one.access.api_key, CHAT)
    assert status == 200
    for path in ("v1/chat/completions", "v1/responses", "v1/messages", "end"):
        status, _ = await post(f"{gateway.address('ro-1')}/{path}", other.access.api_key, CHAT)
        assert status == 401, path
    async with aiohttp.ClientSession() as client:
        for key, expected in ((other.access.api_key, 401), (one.access.api_key, 200)):
            url, headers = f"{gateway.address('ro-1')}/trajectory", {"x-api-key": key}
            async with client.get(url, headers=headers) as answer:
                assert answer.status == expected
    assert len(one.trajectory.turns) == 1
    assert not other.trajectory.turns


@pytest.mark.parametrize("path", ["embeddings", "chat", "chat/completions/x", "", "models"])
async def test_a_path_that_is_not_served_is_refused(path: str, played: Any) -> None:
    status, answer = await post(f"{played.access.base_url}/{path}", played.access.api_key, CHAT)
    assert status == 404
    assert "v1/chat/completions" in answer["error"]["message"]


async def test_nobody_can_open_rollouts_in_a_workers_gateway(played: Any, gateway: Gateway) -> None:
    status, _ = await post(f"{gateway.url}/rollouts", played.access.api_key, {"input": 1})
    assert status == 404


async def test_a_body_over_the_limit_is_refused(clients: Any, engine: Any) -> None:
    gateway = Gateway(max_body=1000)
    played = clients.rollout(gateway, engine, "ro-1")
    url = f"{played.access.base_url}/chat/completions"
    long = {"model": "m", "messages": [{"role": "user", "content": "x" * 1000}]}
    assert (await post(url, played.access.api_key, long))[0] == 413
    assert (await post(url, played.access.api_key, CHAT))[0] == 200
    await gateway.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat/completions", b"{", 400, "cannot be read"),
        ("chat/completions", b"\xff\xfe", 400, "cannot be read"),
        ("chat/completions", {"messages": []}, 422, "no message"),
        ("chat/completions", {"messages": 3}, 422, "messages"),
        ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 422, "wizard"),
        ("chat/completions", {**CHAT, "temperature": -1}, 422, "temperature"),
        ("chat/completions", {**CHAT, "n": 0}, 422, "n"),
        ("chat/completions", {**CHAT, "n": 129}, 422, "n"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "not among the tools"),
        ("chat/completions", {**CHAT, "tool_choice": {"type": "web_search"}}, 400, "web_search"),
        ("chat/completions", {**CHAT, "response_format": {"type": "grammar"}}, 400, "response_format"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, 422, "schema"),
        ("completions", {"prompt": ["one", "two"]}, 400, "one text"),
        ("completions", {"prompt": "one", "echo": True}, 400, "echo"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "images are not supported",
        ),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}, 400, "assistant's"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 422, "tool_call_id"),
        ("responses", {"input": [{"type": "riddle"}]}, 400, "riddle"),
        (
            "responses",
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "images",
        ),
        ("responses", {"input": "x", "previous_response_id": "resp_at-ro-1-7"}, 404, "no response"),
        ("messages", {"messages": [{"role": "user", "content": "x"}]}, 422, "max_tokens"),
        ("messages", {**CHAT, "max_tokens": 5, "tool_choice": {"type": "any"}}, 400, "tool_choice"),
        (
            "messages",
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "images are not supported",
        ),
    ],
)
async def test_a_request_that_cannot_be_served_is_told_why(
    path: str, body: Any, status: int, says: str, played: Any, engine: Any
) -> None:
    found, answer = await post(f"{played.access.base_url}/{path}", played.access.api_key, body)
    assert found == status
    assert says in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert not engine.made


async def test_options_that_change_nothing_are_taken(clients: Any, played: Any) -> None:
    neutral = {"n": 1, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "tool_choice": "auto"}
    async with clients.openai(played.access) as client:
        await client.chat.completions.create(
            **CHAT, **neutral, response_format={"type": "text"}, user="u", seed=3, store=False
        )
    assert len(played.trajectory.turns) == 1


async def test_late_calls_are_told_that_the_rollout_is_over(clients: Any, played: Any) -> None:
    import openai

    async with clients.openai(played.access) as client:
        await client.chat.completions.create(**CHAT)
        await played.close()
        with pytest.raises(openai.APIStatusError, match="sealed") as refused:
            await client.chat.completions.create(**CHAT)
    assert refused.value.status_code == 410
    assert len(played.trajectory.turns) == 1


async def test_sealing_gives_up_the_call_under_way(clients: Any, gateway: Gateway) -> None:
    engine = clients.engine(tokens_per_second=1.0)
    played = clients.rollout(gateway, engine, "ro-1")
    url = f"{played.access.base_url}/chat/completions"
    asking = asyncio.create_task(post(url, played.access.api_key, CHAT))
    while not engine.usage().running:
        await asyncio.sleep(0.01)
    await played.close()
    assert (await asking)[0] == 410
    assert not played.trajectory.turns
    assert not engine.usage().running


async def test_a_prompt_without_room_is_told_as_such_and_does_not_end_the_rollout(
    clients: Any, gateway: Gateway, engine: Any
) -> None:
    played = clients.rollout(gateway, engine, "ro-1", sequence_length=20)
    url, key = f"{played.access.base_url}/chat/completions", played.access.api_key
    long = {"messages": [{"role": "user", "content": "x" * 30}]}
    status, answer = await post(url, key, long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert played.recorder.out_of_room
    assert (await post(url, key, CHAT))[0] == 200
    assert not played.recorder.out_of_room


class Replaceable:
    """An engine that can be replaced while a rollout is played."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_an_engine_that_fails_is_an_engines_failure_until_another_try_succeeds(
    clients: Any, gateway: Gateway
) -> None:
    engine = Replaceable(clients.engine(failure_rate=1.0))
    played = clients.rollout(gateway, engine, "ro-1")
    url, key = f"{played.access.base_url}/chat/completions", played.access.api_key
    status, answer = await post(url, key, CHAT)
    assert (status, answer["error"]["code"]) == (503, "engine_failed")
    with pytest.raises(EpisodeFailure, match="engine: EngineError"):
        played.recorder.raise_failure()
    engine.inner = clients.engine()
    assert (await post(url, key, CHAT))[0] == 200
    played.recorder.raise_failure()
    assert len(played.trajectory.turns) == 1


class UnreachableJournal:
    """The journal of an attempt whose store does not answer."""

    def __init__(self) -> None:
        self.recorded: dict[int, JournalEntry] = {}

    async def append(self, entry: JournalEntry) -> None:
        raise StoreUnavailable("no answer from the store")


async def test_a_defect_behind_the_gateway_is_no_result_either(
    clients: Any, gateway: Gateway, engine: Any
) -> None:
    played = clients.rollout(gateway, engine, "ro-1", journal=UnreachableJournal())
    url, key = f"{played.access.base_url}/messages", played.access.api_key
    status, answer = await post(url, key, {**CHAT, "max_tokens": 5})
    assert (status, answer["error"]["type"]) == (503, "overloaded_error")
    with pytest.raises(EpisodeFailure, match="system: StoreUnavailable"):
        played.recorder.raise_failure()
