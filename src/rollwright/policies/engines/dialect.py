"""What differs between engines: how a request is written, how an answer is read, how weights are exchanged.

A dialect is a small frozen object without state; the policy around it does the rest for all of them.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from rollwright.errors import ConfigError
from rollwright.http_client import Url
from rollwright.policies.base import Capabilities, EngineError, Sampling, UpdateMode, Weights
from rollwright.policies.engines.pieces import Ask, Piece
from rollwright.policies.http_calls import MAX_CONTROL_ANSWER, Fault, HttpCalls, endpoint, engine_error
from rollwright.trajectory import FinishReason, SamplingParams

FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
"""An engine that ends a completion in any other way is not understood, and its answer is not used."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises on bytes of any kind."""

ANSWER_SECONDS = 10.0
"""For a question that needs no generation; an engine that is alive answers in milliseconds."""

UPDATE_SECONDS = 900.0
"""For reading new weights: hundreds of gigabytes from a network disk take minutes."""


class Dialect(Protocol):
    """The requests and answers of one kind of engine."""

    @property
    def path(self) -> str:
        """Of the generation endpoint, below the address."""
        ...

    @property
    def update_modes(self) -> tuple[UpdateMode, ...]:
        """What this kind of engine can do at best; `probe` says what one of them does."""
        ...

    def request(self, ask: Ask) -> bytes: ...

    def response(self, body: bytes, ask: Ask) -> Piece:
        """Raises `FormatError` for anything but a whole answer."""
        ...

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        """What the engine is told, where that is not what was asked for; `None`: it is."""
        ...

    def faithful(self, drawn: SamplingParams, processed: bool) -> bool:
        """Whether the log-probabilities are those of the distribution that these settings give."""
        ...

    async def processed(self, control: "Control") -> bool:
        """Whether log-probabilities are taken after temperature and top-p, found out by asking."""
        ...

    async def probe(self, control: "Control") -> Capabilities: ...

    async def label(self, control: "Control") -> str | None:
        """The name the engine gives its weights; `None`: it does not say."""
        ...

    async def pause(self, control: "Control", mode: UpdateMode) -> None:
        """Returns when no token is sampled any more; but for `drain`, calls under way are answered with what
        they have."""
        ...

    async def load(self, control: "Control", weights: Weights) -> None:
        """Returns when the engine has the weights, no cache of the old ones, and their version as its label."""
        ...

    async def resume(self, control: "Control") -> None: ...


class Control:
    """Requests to one engine that are not generations. Each is sent once; what goes wrong is an `EngineError`."""

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
        """The answer, or `default` where the engine has no such endpoint or does not answer."""
        try:
            return await self.get(path)
        except EngineError:
            return default

    async def serves(self, path: str) -> bool:
        """Whether a POST endpoint exists, without using it."""
        answer = await self._calls.control(
            "GET", self.url(path), None, ANSWER_SECONDS, max_answer=MAX_CONTROL_ANSWER
        )
        return isinstance(answer, Fault) and answer.detail.startswith("HTTP 405")

    async def _ask(self, method: str, path: str, body: bytes | None, seconds: float) -> Any:
        url = self.url(path)
        answer = await self._calls.control(method, url, body, seconds, max_answer=MAX_CONTROL_ANSWER)
        if isinstance(answer, Fault):
            raise engine_error(answer, 1, url)
        try:
            return msgspec.json.decode(answer) if answer.strip() else None
        except UNREADABLE:
            return answer.decode(errors="replace")


def folder_of(weights: Weights) -> str:
    """The folder an engine is told to load."""
    if weights.folder is None:
        raise ConfigError(
            "weights: an engine over HTTP loads a folder, and these are tensors of this process; "
            "accepted: Weights(version, folder=...), as saved by transformers"
        )
    return str(weights.folder)
