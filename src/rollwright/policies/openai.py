"""Any OpenAI-compatible engine or hosted API that speaks text: for evaluation, because it gives no token ids.

What is true: a call ends with a whole completion or with one `EngineError`; how it is retried and counted is
said in `http_calls`. Engines that take and give token ids have clients of their own, in `policies.engines`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from rollwright.errors import ConfigError, FormatError
from rollwright.policies.base import Generation, Prompt, Renderer, Sampling
from rollwright.policies.http_calls import Counters, Fault, HttpCalls, endpoint
from rollwright.policies.openai_api import Api, ChatApi, CompletionsApi
from rollwright.policies.retry import Cause, RetryPolicy


class OpenAIPolicy:
    """See the module's docstring for what always holds."""

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
        """`base_url` is what comes before `/chat/completions`, for example `http://127.0.0.1:8000/v1`.

        `api_key_env` names an environment variable that holds the key. `request_timeout` is the time of one
        try, in seconds. `extra_body` is added to every request.
        """
        self.version = version
        self._api = _api(api, model, extra_body or {})
        self._url = endpoint(base_url, self._api.path)
        self._calls = HttpCalls(
            api_key=api_key,
            api_key_env=api_key_env,
            request_timeout=request_timeout,
            retry=retry,
            max_connections=max_connections,
        )

    @property
    def renderer(self) -> Renderer | None:
        return self._api.renderer

    @property
    def counters(self) -> Counters:
        return self._calls.counters

    @property
    def pressure(self) -> int:
        return self.counters.pressure

    def set_version(self, version: int) -> None:
        """To be called when the engine has new weights."""
        self.version = version

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        counters = self.counters
        counters.requests += 1
        body = self._api.request(prompt, sampling)
        made = await self._calls.repeat(lambda: self._try(body), prompt.key, self._url)
        counters.prompt_tokens += made.prompt_tokens
        counters.completion_tokens += made.completion_tokens
        return made

    async def close(self) -> None:
        """Closes this event loop's connections, when no call is under way. A later call opens new ones."""
        await self._calls.close()

    async def _try(self, body: bytes) -> Generation | Fault:
        answer = await self._calls.once(self._url, body)
        if isinstance(answer, Fault):
            return answer
        try:
            return self._api.response(answer)
        except FormatError as error:
            return Fault(Cause.BROKEN_BODY, f"not a completion: {error}")


def _api(kind: str, model: str, extra_body: Mapping[str, Any]) -> Api:
    if kind == "chat":
        return ChatApi(model, extra_body)
    if kind == "completions":
        return CompletionsApi(model, extra_body)
    raise ConfigError(f"api: {kind!r} is unknown; accepted: chat, completions")
