"""A policy over any OpenAI-compatible engine or hosted API that speaks text; for evaluation, because it gives no token ids.

Always true: a call ends with a whole completion or with one `EngineError`; `http_calls` says how it is retried and counted.
An answer 429 is no failure: the call waits, and with it all calls of this machine to the same API (`rate_limits`).
Tools are sent and tool calls are parsed, or a call with tools is an error. If the environment names a proxy for the address,
every request goes through it. Engines that speak token ids have policies of their own (`vllm`, `sglang`, `llama_cpp`).
"""

import asyncio
import dataclasses
from pathlib import Path

import msgspec

from rollwright.engines.base import Capabilities, Generation, Prompt, Renderer, Sampling
from rollwright.engines.http_calls import CallCounters, CallFault, HttpCalls, endpoint, engine_error
from rollwright.engines.openai_api import ChatApi, CompletionsApi
from rollwright.engines.openai_probe import probe_openai
from rollwright.engines.rate_limits import RateLimiter
from rollwright.engines.settings import OpenAIPolicyConfig
from rollwright.errors import FormatError
from rollwright.http import HttpResponse
from rollwright.http.proxy import proxy_for
from rollwright.http.retry import FaultCause, RetryPolicy
from rollwright.rng import KeyPart, uniform

_TOKEN_BYTES = 2048
"""Bytes of a response for each requested token: its escaped text and fields that servers add. Most send under 10."""

_ANSWER_BYTES = 1 << 20
"""Bytes of a response beside its tokens, reasoning included."""

_BODY_BYTES_PER_TOKEN = 4
"""Bytes of a request for each token of its prompt, as far as limits are concerned; the response tells the true number."""

_QUOTA = "quota"
"""In a 429 that waiting does not end: the account has nothing left."""


class OpenAIPolicy:
    """See the module's docstring for its guarantees."""

    def __init__(
        self,
        settings: OpenAIPolicyConfig,
        *,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        version: int = 0,
        rates_folder: Path | None = None,
    ) -> None:
        """`api_key`, `retry`: see `HttpCalls`. `rates_folder`: where the shared state of the API's limits is."""
        self.version = version
        self.rate_limit_patience = settings.rate_limit_patience
        self._auto_limit = settings.token_limit == "auto"
        self._api = _api(settings)
        self._url = endpoint(settings.base_url, self._api.path)
        proxy = proxy_for(self._url)
        if proxy is not None or settings.compress:
            from rollwright.http.proxy import load_library

            load_library()  # raises now if it is missing, not at the first call
        self._models_url = endpoint(settings.base_url, "/models")
        self._model = settings.model
        self._calls = HttpCalls(
            settings,
            api_key=api_key,
            retry=retry,
            proxy=proxy,
            compress=settings.compress,
            on_response=self._observe,
        )
        self.rates_name = f"{self._url} {settings.model} {settings.api_key_env or ''}"
        """Name of the shared limits: one for each API, model and key."""
        self._rates = RateLimiter(
            self.rates_name,
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
            folder=rates_folder,
        )
        self._limited = settings.requests_per_minute is not None or settings.tokens_per_minute is not None
        """Whether calls ask the limiter: set by the settings, by headers or by the first 429."""

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
        reserved = len(body) // _BODY_BYTES_PER_TOKEN + sampling.max_tokens
        tries, waits, began = 1, 0, asyncio.get_running_loop().time()
        while True:
            if self._limited:
                await self._rates.acquire(reserved)
            try:
                made = await self._send(body, longest)
                break
            except CallFault as fault:
                if self._wants_other_limit(fault):
                    self._api = dataclasses.replace(self._api, token_limit="max_completion_tokens")
                    body = self._api.request(prompt, sampling)
                elif fault.cause is FaultCause.RATE_LIMITED:
                    waits += 1
                    waited = asyncio.get_running_loop().time() - began
                    await self._sit_out(fault, waits, waited, prompt.key)
                else:
                    tries = await self._calls.back_off(fault, tries, prompt.key, self._url)
        if self._limited:
            self._rates.settle(reserved, made.prompt_tokens + made.completion_tokens)
        if (drawn := self._api.sent(sampling)) is not None:
            made = msgspec.structs.replace(made, sampling=drawn)
        counters.prompt_tokens += made.prompt_tokens
        counters.completion_tokens += made.completion_tokens
        return made

    async def _sit_out(self, fault: CallFault, waits: int, waited: float, key: tuple[KeyPart, ...]) -> None:
        """Wait after a 429, and let all calls of this machine wait; it is no failure of the call while there is patience."""
        if _QUOTA in fault.detail or waited >= self.rate_limit_patience:
            self.counters.failures[fault.cause] += 1
            raise engine_error(fault, waits, self._url)
        self.counters.retries[fault.cause] += 1
        pause = self._calls.retry.delay(
            min(waits, self._calls.retry.max_retries),
            fault.cause,
            fault.retry_after,
            uniform(*key, "429", waits),
        )
        pause = self._calls.retry.longest if pause is None else pause
        self._limited = True
        self._rates.pause(
            min(pause, self._calls.retry.longest if fault.retry_after is None else fault.retry_after)
        )
        await asyncio.sleep(pause)

    def _wants_other_limit(self, fault: CallFault) -> bool:
        """Whether the API refuses `max_tokens` and names the field that it takes."""
        asked = fault.cause is FaultCause.REFUSED and "max_completion_tokens" in fault.detail
        return asked and self._auto_limit and self._api.token_limit == "max_tokens"

    def _observe(self, response: HttpResponse) -> None:
        if response.header("x-ratelimit-limit-requests") or response.header("x-ratelimit-limit-tokens"):
            self._limited = True
        if self._limited:
            self._rates.observe(response)

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


def _api(settings: OpenAIPolicyConfig) -> ChatApi | CompletionsApi:
    limit = "max_tokens" if settings.token_limit == "auto" else settings.token_limit
    kind = ChatApi if settings.api == "chat" else CompletionsApi
    return kind(settings.model, settings.extra_body, limit, tuple(settings.omit))
