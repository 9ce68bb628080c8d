"""Engine dialects: the requests, responses and weight updates of one kind of engine.

A dialect is a small frozen object without state; `HttpEnginePolicy` does the rest for all kinds.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from rollwright.engines.base import Capabilities, EngineError, Sampling, UpdateMode, Weights
from rollwright.engines.http_calls import MAX_CONTROL_ANSWER, CallFault, HttpCalls, endpoint, engine_error
from rollwright.engines.partial import PartialCompletion, Piece
from rollwright.errors import ConfigError
from rollwright.http import Url
from rollwright.trajectory import FinishReason, SamplingParams

FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
"""An answer with any other finish reason is not used."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding raises on arbitrary bytes."""

ANSWER_SECONDS = 10.0
"""For a request without a generation; a healthy engine answers in milliseconds."""

UPDATE_SECONDS = 900.0
"""For reading new weights: hundreds of gigabytes from a network disk take minutes."""


class EngineDialect(Protocol):
    """The requests and responses of one kind of engine."""

    @property
    def path(self) -> str:
        """Path of the generation endpoint."""
        ...

    @property
    def update_modes(self) -> tuple[UpdateMode, ...]:
        """The most that this kind of engine supports; `probe` finds what a server supports."""
        ...

    def request(self, partial: PartialCompletion) -> bytes:
        """The body of the next request, which continues behind the tokens sampled so far."""
        ...

    def response(self, body: bytes, partial: PartialCompletion) -> Piece:
        """Parse a response; raise `FormatError` for anything but a whole one."""
        ...

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        """The sampling settings that the engine gets, if they differ from these; `None`: they do not."""
        ...

    def faithful(self, drawn: SamplingParams, processed: bool) -> bool:
        """Whether the log-probabilities are those of the distribution that these settings give."""
        ...

    async def ask_processed(self, control: "Control") -> bool:
        """Asks the engine whether its log-probabilities are taken after temperature and top-p."""
        ...

    async def probe(self, control: "Control") -> Capabilities: ...

    async def label(self, control: "Control") -> str | None:
        """The engine's label of its weights; `None`: it has none."""
        ...

    async def pause(self, control: "Control", mode: UpdateMode) -> None:
        """Return when no token is being sampled. Except for `drain`, running calls are answered with the tokens they have."""
        ...

    async def load(self, control: "Control", weights: Weights) -> None:
        """Return when the engine has the weights, no cache of the old ones, and the version as its label."""
        ...

    async def resume(self, control: "Control") -> None: ...


@runtime_checkable
class AdapterDialect(Protocol):
    """A kind of engine that loads LoRA adapters while it runs, each under a name that requests choose it by."""

    def with_adapter(self, body: bytes, name: str) -> bytes:
        """The body of a request, sampled with the adapter of this name."""
        ...

    async def load_adapter(self, control: "Control", name: str, folder: str) -> None:
        """Return when requests may name the adapter; also if it was loaded before."""
        ...

    async def unload_adapter(self, control: "Control", name: str) -> None:
        """Called when no request with the adapter is under way."""
        ...

    async def has_adapter(self, control: "Control", name: str) -> bool: ...


class Control:
    """Control requests to one engine, which are not generations. Each is sent once; a failure is an `EngineError`."""

    def __init__(self, calls: HttpCalls, base_url: str) -> None:
        self.base_url = base_url
        self._calls = calls

    def url(self, path: str) -> Url:
        return endpoint(self.base_url, path, "base_urls")

    async def get(self, path: str) -> Any:
        return await self._ask("GET", path, None, ANSWER_SECONDS)

    async def post(
        self, path: str, fields: Mapping[str, Any] | None = None, seconds: float = ANSWER_SECONDS
    ) -> Any:
        return await self._ask("POST", path, msgspec.json.encode(fields or {}), seconds)

    async def get_or(self, path: str, default: Any) -> Any:
        """The response, or `default` if the engine has no such endpoint or does not answer."""
        try:
            return await self.get(path)
        except EngineError:
            return default

    async def serves(self, path: str) -> bool:
        """Whether a POST endpoint exists, without using it."""
        try:
            await self._calls.send_control(
                "GET", self.url(path), None, ANSWER_SECONDS, max_answer=MAX_CONTROL_ANSWER
            )
        except CallFault as fault:
            return fault.detail.startswith("HTTP 405")
        return False

    async def _ask(self, method: str, path: str, body: bytes | None, seconds: float) -> Any:
        url = self.url(path)
        try:
            answer = await self._calls.send_control(method, url, body, seconds, max_answer=MAX_CONTROL_ANSWER)
        except CallFault as fault:
            raise engine_error(fault, 1, url) from fault
        try:
            return msgspec.json.decode(answer) if answer.strip() else None
        except UNREADABLE:
            return answer.decode(errors="replace")


def folder_of(weights: Weights) -> str:
    """The folder that an engine loads; raise a `ConfigError` for weights without one."""
    if weights.folder is None:
        raise ConfigError(
            "weights: an engine over HTTP loads a folder, and these are tensors of this process; "
            "accepted: Weights(version, folder=...), as saved by transformers"
        )
    return str(weights.folder)
