"""A policy over any OpenAI-compatible engine or hosted API that speaks text; for evaluation, because it gives no token ids.

Always true: a call ends with a whole completion or with one `EngineError`; `http_calls` says how it is retried and counted.
Tools are sent and tool calls are parsed, or a call with tools is an error. If the environment names a proxy for the address,
every request goes through it. Engines that speak token ids have policies of their own (`vllm`, `sglang`, `llama_cpp`).
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rollwright.engines.base import Capabilities, Generation, Prompt, Renderer, Sampling
from rollwright.engines.http_calls import CallCounters, CallFault, HttpCalls, endpoint
from rollwright.engines.openai_api import ChatApi, CompletionsApi, TextApi
from rollwright.engines.openai_probe import probe_openai
from rollwright.errors import ConfigError, FormatError
from rollwright.http.proxy import proxy_for
from rollwright.http.retry import FaultCause, RetryPolicy

_TOKEN_BYTES = 2048
"""Bytes of a response for each requested token: its escaped text and fields that servers add. Most send under 10."""

_ANSWER_BYTES = 1 << 20
"""Bytes of a response beside its tokens, reasoning included."""


class OpenAIPolicy:
    """See the module's docstring for its guarantees."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api: Literal["chat", "completions"] = "chat",
        api_key: str | None = None,
        api_key_env: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        request_timeout: float = 120.0,
        retry: RetryPolicy | None = None,
        max_connections: int = 4096,
        version: int = 0,
    ) -> None:
        """`base_url`: the address before `/chat/completions`, for example `http://127.0.0.1:8000/v1`.

        `api_key_env`: name of the environment variable that holds the key. `request_timeout`: seconds for one try.
        `extra_body`: further fields of every request.
        """
        self.version = version
        self._api = _api(api, model, extra_body or {})
        self._url = endpoint(base_url, self._api.path)
        proxy = proxy_for(self._url)
        if proxy is not None:
            from rollwright.http.proxy import load_library

            load_library()  # raises now if it is missing, not at the first call
        self._models_url = endpoint(base_url, "/models")
        self._model = model
        self._calls = HttpCalls(
            api_key=api_key,
            api_key_env=api_key_env,
            request_timeout=request_timeout,
            retry=retry,
            max_connections=max_connections,
            proxy=proxy,
        )

    @property
    def renderer(self) -> Renderer | None:
        return self._api.renderer

    @property
    def takes_tools(self) -> bool:
        """Whether requests can carry tools."""
        return self._api.takes_tools

    @property
    def constrains_output(self) -> bool:
        """Whether forced tool calls and JSON formats are passed on, for the server to enforce: by chat completions."""
        return isinstance(self._api, ChatApi)

    @property
    def counters(self) -> CallCounters:
        return self._calls.counters

    @property
    def pressure(self) -> int:
        return self.counters.pressure

    def set_version(self, version: int) -> None:
        """Set the version; call it when the engine has new weights."""
        self.version = version

    async def probe(self) -> Capabilities:
        """Check that the server is reachable and serves the model; see `openai_probe`."""
        return await probe_openai(self._calls, self._models_url, self._url, self._api, self._model)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        counters = self.counters
        counters.requests += 1
        body = self._api.request(prompt, sampling)
        longest = _ANSWER_BYTES + _TOKEN_BYTES * sampling.max_tokens
        tries = 1
        while True:
            try:
                made = await self._send(body, longest)
                break
            except CallFault as fault:
                tries = await self._calls.back_off(fault, tries, prompt.key, self._url)
        if (drawn := self._api.sent(sampling)) is not None:
            made = msgspec.structs.replace(made, sampling=drawn)
        counters.prompt_tokens += made.prompt_tokens
        counters.completion_tokens += made.completion_tokens
        return made

    async def close(self) -> None:
        """Close this event loop's connections while no call is under way. A later call opens new ones."""
        await self._calls.close()

    async def _send(self, body: bytes, longest: int) -> Generation:
        """Send the request once; raise `CallFault`."""
        answer = await self._calls.post(self._url, body, longest)
        try:
            return self._api.response(answer)
        except FormatError as error:
            raise CallFault(FaultCause.BROKEN_BODY, f"not a completion: {error}") from error


def _api(kind: str, model: str, extra_body: Mapping[str, Any]) -> TextApi:
    if kind == "chat":
        return ChatApi(model, extra_body)
    if kind == "completions":
        return CompletionsApi(model, extra_body)
    raise ConfigError(f"api: {kind!r} is unknown; accepted: chat, completions")
