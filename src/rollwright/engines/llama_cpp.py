"""llama.cpp's own server (`llama-server`) and its `/completion`.

Builds that support `return_tokens` and `post_sampling_probs` (since the end of 2024) return the sampled ids and their
probabilities after all samplers, which is exact. A build or wrapper without ids, and a completion that a stop string ended
(its probabilities are cut off with the string), are not exact and for evaluation only. Weights cannot be updated while the
server runs. It stops at the model's own end-of-turn ids; requests cannot set others.
"""

from dataclasses import dataclass
from math import log
from typing import Any, ClassVar

import msgspec

from rollwright.engines.base import Capabilities, EngineError, Renderer, Sampling, UpdateMode, Weights
from rollwright.engines.dialect import UNREADABLE, UPDATE_SECONDS, Control
from rollwright.engines.http_policy import HttpEnginePolicy
from rollwright.engines.openai_api import one_line
from rollwright.engines.partial import PartialCompletion, Piece, check_piece
from rollwright.engines.settings import EngineServersConfig
from rollwright.errors import FormatError
from rollwright.trajectory import FinishReason, SamplingParams, floats, token_ids

NO_IDS = (
    "this build of llama.cpp's server returns no token ids: evaluation only; use a llama-server that knows "
    "`return_tokens`, or vLLM"
)

_FINISHES = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}

_SAMPLERS = ("temperature", "top_p")
"""In this order, as in the other engines; llama.cpp's default has more samplers, and the temperature last."""


class _Probability(msgspec.Struct):
    id: int
    prob: float


class _Answer(msgspec.Struct):
    content: str
    stop_type: str = ""
    tokens: list[int] | None = None
    completion_probabilities: list[_Probability] | None = None
    tokens_predicted: int | None = None
    truncated: bool = False


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True)
class LlamaCppDialect:
    """Requests and responses of llama.cpp's server."""

    path = "/completion"
    constrains_output = True
    update_modes: ClassVar[tuple[UpdateMode, ...]] = ()

    def request(self, partial: PartialCompletion) -> bytes:
        fields: dict[str, Any] = {
            "prompt": partial.input_ids.tolist(),
            "temperature": partial.sampling.temperature,
            "top_p": partial.sampling.top_p,
            "samplers": _SAMPLERS,
            "repeat_penalty": 1.0,
            "n_predict": partial.max_tokens,
            "return_tokens": True,
            "n_probs": 1,
            "post_sampling_probs": True,
            "cache_prompt": True,
            "stream": False,
        }
        if partial.sampling.stop:
            fields["stop"] = partial.sampling.stop
        if partial.seed is not None:
            fields["seed"] = partial.seed
        if partial.sampling.output is not None:  # the server makes a grammar of it
            fields["json_schema"] = partial.sampling.output.schema
        return msgspec.json.encode(fields)

    def response(self, body: bytes, partial: PartialCompletion) -> Piece:
        try:
            answer = _decode(body)
        except UNREADABLE as error:
            raise FormatError(one_line(str(error))) from error
        finish = _FINISHES.get(answer.stop_type)
        if finish is None:
            raise FormatError(f"stop_type {answer.stop_type!r}; accepted: {', '.join(_FINISHES)}")
        if answer.truncated:
            raise FormatError("the server cut the prompt to fit its context")
        probabilities = answer.completion_probabilities
        if not answer.tokens or probabilities is None or answer.stop_type == "word":
            return Piece(token_ids(), floats(), finish, text=answer.content)
        if [each.id for each in probabilities] != answer.tokens:
            raise FormatError(
                f"{len(answer.tokens)} tokens, but the probabilities of {len(probabilities)} others"
            )
        logprobs = [log(each.prob) if each.prob > 0 else None for each in probabilities]
        return check_piece(partial, answer.tokens, logprobs, finish)

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        return None

    def faithful(self, drawn: SamplingParams, processed: bool) -> bool:
        return True

    async def ask_processed(self, control: Control) -> bool:
        return True

    async def probe(self, control: Control) -> Capabilities:
        props = await control.get("/props")
        if not isinstance(props, dict):
            raise EngineError(f"{control.url('/props')}: not llama-server's answer: {one_line(str(props))}")
        partial = PartialCompletion(token_ids([1]), Sampling(temperature=1.0, max_tokens=1), seed=0)
        answer = await control.post(self.path, msgspec.json.decode(self.request(partial)), UPDATE_SECONDS)
        try:
            exact = self.response(msgspec.json.encode(answer), partial).text is None
        except FormatError as error:
            raise EngineError(f"{control.url(self.path)}: not a completion: {error}") from error
        build = props.get("build_info")
        return Capabilities(
            engine=f"llama.cpp {build}" if build else "llama.cpp",
            model=str(props.get("model_alias") or props.get("model_path") or ""),
            token_ids=exact,
            logprobs=exact,
            missing="" if exact else NO_IDS,
        )

    async def label(self, control: Control) -> str | None:
        return None

    async def pause(self, control: Control, mode: UpdateMode) -> None:
        raise EngineError(f"{control.base_url}: llama.cpp's server cannot exchange weights while it runs")

    async def load(self, control: Control, weights: Weights) -> None:
        raise NotImplementedError("`pause` has refused already")

    async def resume(self, control: Control) -> None:
        raise NotImplementedError("`pause` has refused already")


class LlamaCppPolicy(HttpEnginePolicy):
    """llama.cpp servers with one model. See `HttpEnginePolicy` for the guarantees and the other settings."""

    def __init__(self, servers: EngineServersConfig | str, renderer: Renderer, **more: Any) -> None:
        """`servers`: settings, or an address like `http://127.0.0.1:8080`."""
        super().__init__(servers, LlamaCppDialect(), renderer, **more)
