"""Gemini's API at the gateway: contents, functions, streams, counts and errors, with the ids that were sampled."""

import json
from typing import Any

import httpx
import pytest

from rollwright.engines.base import Sampling
from rollwright.gateway import CaptureRules, Gateway
from rollwright.trajectory import check, full_prompt, samples

LOOK = {
    "name": "look",
    "description": "Looks somewhere.",
    "parameters": {"type": "OBJECT", "properties": {"where": {"type": "STRING", "nullable": True}}},
}
SCRIPT = {
    "task": "where",
    "replies": [
        {
            "reasoning": "I look.",
            "say": "One moment.",
            "call": {"name": "look", "arguments": {"where": "left"}},
        },
        {"calls": [{"name": "look", "arguments": {"where": each}} for each in ("up", "down")]},
        {"say": "It is {result}."},
    ],
}


class GeminiClient:
    """Sends what Google's SDK sends, and keeps the conversation as its chats do."""

    def __init__(self, played: Any, *, snake: bool = False, with_ids: bool = True) -> None:
        self._played = played
        self._snake = snake
        self._with_ids = with_ids
        self.contents: list[dict[str, Any]] = []
        self.headers = {"x-goog-api-key": played.access.api_key}

    def url(self, method: str) -> str:
        root = self._played.access.base_url.removesuffix("/v1")
        return f"{root}/v1beta/models/gemini-pro:{method}"

    def request(self) -> dict[str, Any]:
        declared, system = "functionDeclarations", "systemInstruction"
        if self._snake:
            declared, system = "function_declarations", "system_instruction"
        return {
            "contents": self.contents,
            system: {"parts": [{"text": "Be brief."}]},
            "tools": [{declared: [LOOK]}],
        }

    async def say(self, *parts: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
        self.contents.append({"role": "user", "parts": list(parts)})
        async with httpx.AsyncClient(headers=self.headers) as http:
            if stream:
                told = await http.post(
                    self.url("streamGenerateContent"), params={"alt": "sse"}, json=self.request()
                )
                events = [json.loads(each[6:]) for each in told.text.split("\n\n") if each]
            else:
                told = await http.post(self.url("generateContent"), json=self.request())
                events = [told.json()]
        assert told.status_code == 200, told.text
        assert events[-1]["candidates"][0]["finishReason"] == "STOP"
        said = [part for each in events for part in each["candidates"][0]["content"]["parts"]]
        kept = [part for part in said if not part.get("thought")]
        self.contents.append({"role": "model", "parts": kept})
        return said

    def answer(self, call: dict[str, Any], text: str) -> dict[str, Any]:
        told = {"name": call["name"], "response": {"output": text}}
        return {"functionResponse": {**told, "id": call["id"]} if self._with_ids else told}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("snake", [False, True], ids=["camel", "snake"])
@pytest.mark.parametrize("with_ids", [False, True], ids=["without ids", "with ids"])
async def test_functions_are_called_and_answered_as_one_exact_sequence(
    stream: bool, snake: bool, with_ids: bool, clients: Any, gateway: Gateway
) -> None:
    engine = clients.scripted(SCRIPT)
    played = clients.rollout(gateway, engine, "ro-1")
    client = GeminiClient(played, snake=snake, with_ids=with_ids)
    thought, said, called = await client.say({"text": "where is it?"}, stream=stream)
    assert thought == {"text": "I look.", "thought": True}
    assert said == {"text": "One moment."}
    call = called["functionCall"]
    assert (call["name"], call["args"]) == ("look", {"where": "left"})
    if not with_ids:
        for part in client.contents[-1]["parts"]:
            part.get("functionCall", {}).pop("id", None)
    calls = await client.say(client.answer(call, "not there"), stream=stream)
    answers = [
        client.answer(each["functionCall"], f"seen {each['functionCall']['args']['where']}") for each in calls
    ]
    if not with_ids:
        for part in client.contents[-1]["parts"]:
            part["functionCall"].pop("id", None)
    (last,) = await client.say(*answers, stream=stream)
    assert last == {"text": "It is seen down."}
    trajectory = check(await played.close())
    assert [turn.extends for turn in trajectory.turns] == [None, 0, 1]
    assert trajectory.metrics == {}
    for turn, (prompt, _, made) in zip(trajectory.turns, engine.made, strict=True):
        assert turn.sampled_ids == made.sampled_ids
        assert full_prompt(trajectory.turns, turn.id) == prompt.ids
    (row,) = samples(trajectory)
    assert sum(row.mask) == sum(len(turn.sampled_ids) for turn in trajectory.turns)


async def test_the_tool_and_the_system_prompt_reach_the_model_as_a_json_schema(
    clients: Any, gateway: Gateway
) -> None:
    engine = clients.scripted(SCRIPT)
    await GeminiClient(clients.rollout(gateway, engine, "ro-1")).say({"text": "where?"}, stream=False)
    prompt = engine.renderer.decode(engine.made[0][0].ids)
    assert '"where":{"type":["string","null"]}' in prompt
    assert '"type":"object"' in prompt
    assert "Be brief." in prompt


async def test_tokens_are_counted_and_models_listed(clients: Any, gateway: Gateway) -> None:
    engine = clients.scripted({"replies": [{"say": "yes"}]})
    played = clients.rollout(gateway, engine, "ro-1")
    client = GeminiClient(played)
    client.contents.append({"role": "user", "parts": [{"text": "where?"}]})
    async with httpx.AsyncClient(headers=client.headers) as http:
        whole = {"generateContentRequest": client.request()}
        counted = (await http.post(client.url("countTokens"), json=whole)).json()
        told = (await http.post(client.url("generateContent"), json=client.request())).json()
        listed = (await http.get(client.url("x").rpartition("/")[0])).json()
        by_query = await httpx.AsyncClient().post(
            client.url("generateContent"), params={"key": played.access.api_key}, json=client.request()
        )
        array = (await http.post(client.url("streamGenerateContent"), json=client.request())).json()
    assert counted["totalTokens"] == told["usageMetadata"]["promptTokenCount"] > 0
    assert listed["models"][0]["name"] == "models/policy"
    assert by_query.status_code == 200
    assert [each["candidates"][0]["content"]["parts"] for each in array] == [[{"text": "yes"}]]


async def test_sampling_limits_stops_and_formats_are_those_of_the_other_apis(
    clients: Any, gateway: Gateway
) -> None:
    engine = clients.scripted({"replies": [{"say": "one two three"}]})
    honoured = clients.rollout(
        gateway,
        engine,
        "ro-1",
        rules=CaptureRules(client_sampling="honoured"),
        sampling=Sampling(max_tokens=64),
    )
    schema = {"type": "OBJECT", "properties": {"n": {"type": "INTEGER"}}, "required": ["n"]}
    body = {
        "contents": [{"parts": [{"text": "count"}]}],
        "generationConfig": {
            "temperature": 0.5,
            "topP": 0.9,
            "maxOutputTokens": 40,
            "stopSequences": [" three"],
            "candidateCount": 2,
        },
    }
    format_body = {
        "contents": "count",
        "generationConfig": {"responseMimeType": "application/json", "responseSchema": schema},
    }
    client = GeminiClient(honoured)
    async with httpx.AsyncClient(headers=client.headers) as http:
        told = (await http.post(client.url("generateContent"), json=body)).json()
        formatted = (await http.post(client.url("generateContent"), json=format_body)).json()
    assert [each["content"]["parts"] for each in told["candidates"]] == [[{"text": "one two"}]] * 2
    asked = engine.made[0][1]
    assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.5, 0.9, 40)
    value = json.loads(formatted["candidates"][0]["content"]["parts"][0]["text"])
    assert isinstance(value["n"], int)


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"contents": 3}, 422, "contents: expected a list"),
        ({"contents": []}, 422, "no message"),
        ({"contents": [{"role": "judge", "parts": []}]}, 422, "expected user or model"),
        ({"contents": [{"parts": [{"inlineData": {"data": ""}}]}]}, 400, "images and files"),
        ({"contents": [{"parts": [{"executableCode": {}}]}]}, 400, "executableCode is not supported"),
        ({"contents": "a", "generationConfig": {"temperature": "hot"}}, 422, "generationConfig.temperature"),
        ({"contents": "a", "generationConfig": {"candidateCount": 99}}, 422, "from 1 to 8"),
        ({"contents": "a", "generationConfig": {"stopSequences": "x"}}, 422, "list of texts"),
        ({"contents": "a", "generationConfig": {"responseMimeType": "image/png"}}, 400, "image/png"),
        ({"contents": "a", "toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, 400, "SOME"),
        ({"contents": "a", "tools": [{"functionDeclarations": [{}]}]}, 422, "needs a name"),
        ({"contents": [{"role": "model", "parts": [{"text": "a"}]}]}, 400, "continuing a given answer"),
    ],
)
async def test_what_is_wrong_is_one_line_in_the_words_of_the_api(
    body: Any, status: int, why: str, clients: Any, gateway: Gateway
) -> None:
    played = clients.rollout(gateway, clients.scripted({"replies": [{"say": "yes"}]}), "ro-1")
    client = GeminiClient(played)
    async with httpx.AsyncClient(headers=client.headers) as http:
        told = await http.post(client.url("generateContent"), json=body)
    error = told.json()["error"]
    assert (told.status_code, error["code"]) == (status, status)
    assert error["status"] == "INVALID_ARGUMENT"
    assert why in error["message"]


async def test_a_wrong_key_and_an_unknown_method_are_refused(clients: Any, gateway: Gateway) -> None:
    client = GeminiClient(clients.rollout(gateway, clients.scripted({"replies": [{"say": "yes"}]}), "ro-1"))
    async with httpx.AsyncClient() as http:
        stranger = await http.post(
            client.url("generateContent"), headers={"x-goog-api-key": "no"}, json={"contents": "a"}
        )
        unknown = await http.post(client.url("embedContent"), headers=client.headers, json={"contents": "a"})
    assert (stranger.status_code, stranger.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
    assert unknown.status_code == 404


async def test_provider_tools_are_passed_over_and_forced_functions_called(
    clients: Any, gateway: Gateway
) -> None:
    engine = clients.scripted({"replies": [{"say": "no call of my own"}]})
    played = clients.rollout(gateway, engine, "ro-1")
    client = GeminiClient(played)
    body = {
        "contents": "where?",
        "tools": [{"functionDeclarations": [LOOK]}, {"googleSearch": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}},
    }
    async with httpx.AsyncClient(headers=client.headers) as http:
        told = await http.post(client.url("generateContent"), json=body)
    (part,) = told.json()["candidates"][0]["content"]["parts"]
    assert part["functionCall"]["name"] == "look"
    assert played.trajectory.metrics["gateway_tools_ignored"] == 1
    assert "googleSearch" in told.headers["x-rollwright-note"]
