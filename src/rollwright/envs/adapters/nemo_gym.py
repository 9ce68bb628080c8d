"""Adapter for NeMo-Gym: a client of a resources server, in the part of NeMo-Gym's own simple agent.

An episode is a row of a dataset in NeMo-Gym's form. As in the simple agent: `/seed_session` gets the row; the model is asked
with the row's `responses_create_params`; each function that it calls is a POST to the resources server under the function's
name, and whatever that answers is what the model sees, errors included; `/verify` gets the row with the whole response and
gives the reward. Cookies carry the session. A server that cannot be reached, or does not verify, is the environment's failure,
never a reward.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollwright.envs.adapters.nemo_gym_items import (
    call_item,
    chat_messages,
    chat_tools,
    message_item,
    response_object,
)
from rollwright.envs.base import EnvironmentFailure, EpisodeResult, ModelAccess, PromptTemplates, Reset, Step
from rollwright.errors import ConfigError
from rollwright.http import HttpClient, HttpFault, HttpResponse, Url

_PROMPTS = PromptTemplates(system="", opening="{observation}", turn="{observation}")
_MAX_ANSWER = 64 << 20
_PASSED_ON = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""Settings of a row that are passed to the model; the run's gateway decides which of them count."""


class NemoGym:
    """One row at a time, on a resources server."""

    stateless = False
    """It cannot be copied; see `rollwright.envs.base.can_fork`."""

    def __init__(
        self,
        url: str,
        *,
        dataset: str,
        max_calls: int = 32,
        time_limit: float = 120.0,
        success_at: float = 1.0,
    ) -> None:
        """`url`: of the resources server. `dataset`: file of rows with `responses_create_params`, as `ng_prepare_data` writes
        them. `max_calls`: most calls of the model in an episode. `time_limit`: seconds of one call of the server.
        `success_at`: reward from which on an episode counts as solved."""
        try:
            Url.parse(url)
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address of a resources server: {error}") from error
        if max_calls < 1:
            raise ConfigError(f"max_calls must be 1 or more, got {max_calls}")
        self._url = url.rstrip("/")
        self._rows = _read_rows(Path(dataset))
        self._max_calls, self._time_limit, self._success_at = max_calls, time_limit, success_at
        self._client: HttpClient | None = None
        self._cookies: dict[str, str] = {}
        self.task: Mapping[str, Any] = {}

    @property
    def samples(self) -> int:
        """Rows of the dataset; levels beyond begin again."""
        return len(self._rows)

    @property
    def instruction(self) -> str:
        return ""

    @property
    def prompts(self) -> PromptTemplates:
        return _PROMPTS

    async def reset(self, seed: int) -> Reset:
        self.task = self._rows[seed % len(self._rows)]
        self._cookies = {}
        response = await self._post("/seed_session", self.task)
        if response.status != 200:
            raise EnvironmentFailure(f"{self._url}/seed_session: {_reason(response)}")
        asked = chat_messages(self.task["responses_create_params"])
        return Reset(asked[-1]["content"] or "" if asked else "", {"success": False})

    async def play_episode(self, model: ModelAccess) -> EpisodeResult:
        wanted = self.task["responses_create_params"]
        messages, tools = chat_messages(wanted), chat_tools(wanted)
        settings = {ours: wanted[name] for name, ours in _PASSED_ON.items() if wanted.get(name) is not None}
        output: list[dict[str, Any]] = []
        complete = True
        for _ in range(self._max_calls):
            body = {
                "model": "policy",
                "messages": messages,
                **({"tools": tools} if tools else {}),
                **settings,
            }
            status, answer = await model.complete(json.dumps(body).encode())
            if status != 200:
                raise EnvironmentFailure(f"the model answered with status {status}: {answer[:300]!r}")
            choice = json.loads(answer)["choices"][0]
            said, calls = choice["message"], choice["message"].get("tool_calls") or []
            messages.append(said)
            complete = choice["finish_reason"] != "length"
            output += message_item(said, len(output), complete=complete)
            output += [call_item(each) for each in calls]
            if not calls or not complete:
                break
            for each in calls:
                seen = await self._call_tool(each["function"])
                messages.append({"role": "tool", "tool_call_id": each["id"], "content": seen})
                output.append({"type": "function_call_output", "call_id": each["id"], "output": seen})
        return await self._verify(response_object(wanted, output, int(time.time()), complete=complete))

    async def _call_tool(self, function: Mapping[str, Any]) -> str:
        """What the model sees of a call: the server's answer, also one that refuses."""
        try:
            arguments = json.loads(function["arguments"])
        except ValueError as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        name = str(function["name"])
        if (
            not name.replace("_", "").replace("-", "").isalnum()
        ):  # a path of its own would be another endpoint
            return json.dumps({"error": f"there is no function {name[:80]!r}"})
        return (await self._post(f"/{name}", arguments)).body.decode(errors="replace")

    async def _verify(self, response: Mapping[str, Any]) -> EpisodeResult:
        asked = {**self.task, "response": response}
        answer = await self._post("/verify", asked)
        if answer.status != 200:
            raise EnvironmentFailure(f"{self._url}/verify: {_reason(answer)}")
        try:
            said = json.loads(answer.body)
            reward = float(said["reward"])
        except (ValueError, TypeError, KeyError) as error:
            raise EnvironmentFailure(
                f"{self._url}/verify: gave no reward: {type(error).__name__}: {error}"
            ) from error
        others = {
            name: float(value)
            for name, value in said.items()
            if name != "reward" and name not in asked and isinstance(value, int | float)
        }
        return EpisodeResult(reward, reward >= self._success_at, {"reward": reward}, others)

    async def _post(self, path: str, content: Any) -> HttpResponse:
        if self._client is None:
            self._client = HttpClient(
                {"Content-Type": "application/json"}, keep_alive=0, max_answer=_MAX_ANSWER
            )
        told = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        try:
            response = await self._client.request(
                "POST",
                Url.parse(f"{self._url}{path}"),
                json.dumps(content).encode(),
                self._time_limit,
                header_lines=f"Cookie: {told}\r\n" if told else "",
            )
        except HttpFault as error:
            raise EnvironmentFailure(f"{self._url}{path}: {error}") from error
        for name, value in response.headers:
            if name.lower() == b"set-cookie":
                cookie, _, rest = value.decode("latin-1").partition("=")
                self._cookies[cookie.strip()] = rest.partition(";")[0]
        return response

    async def step(self, answer: str) -> Step:
        raise EnvironmentFailure("nemo_gym: it plays whole episodes by itself and takes no steps")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _reason(response: HttpResponse) -> str:
    words = " ".join(response.body.decode(errors="replace").split())
    return f"status {response.status}: {words[:300]}"


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a dataset; a `ConfigError` names the line that is wrong."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"dataset: {file} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row["responses_create_params"]["input"]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"dataset: {file}, line {number}: is no row of NeMo-Gym with responses_create_params.input: {error!r}"
            ) from error
        rows.append(row)
    if not rows:
        raise ConfigError(f"dataset: {file} has no rows")
    return rows
