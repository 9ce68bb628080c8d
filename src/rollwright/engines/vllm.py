"""vLLM's completions endpoint, with token ids in and out.

Pausing, weight updates and the label of weights need a server that was started with `VLLM_SERVER_DEV_MODE=1`. With
`--logprobs-mode processed_logprobs` its log-probabilities are those of the sampled distribution; without it they are those of
the unscaled distribution, which is the same only at temperature 1 and top-p 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import msgspec

from rollwright.engines.base import Capabilities, EngineError, Renderer, Sampling, UpdateMode, Weights
from rollwright.engines.constraints import response_format
from rollwright.engines.dialect import FINISHES, UNREADABLE, UPDATE_SECONDS, Control, folder_of
from rollwright.engines.http_policy import HttpEnginePolicy
from rollwright.engines.openai_api import one_line, sent, shaping
from rollwright.engines.openai_probe import name_some, served_models
from rollwright.engines.partial import PartialCompletion, Piece, check_piece
from rollwright.engines.settings import EngineServersConfig
from rollwright.errors import ConfigError, FormatError
from rollwright.trajectory import SamplingParams, token_ids

PROCESSED_FLAG = "--logprobs-mode processed_logprobs"
ADAPTER_FLAGS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora --max-lora-rank R --max-loras 2"

_OWN_FIELDS = frozenset(
    {"model", "prompt", "stream", "n", "echo", "logprobs", "return_token_ids", "max_tokens"}
)
"""Fields of the body that `extra_body` must not set: the client makes them, or relies on their default."""

_NEUTRAL = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sent explicitly, because a model's `generation_config.json` may set other defaults in the server, which would change the
distribution unnoticed."""

_OWN_DISTRIBUTION = SamplingParams()
"""The model's own distribution, to which raw log-probabilities belong."""

_HOT = 2.0
"""The highest temperature that vLLM accepts. Processed log-probabilities are flatter there; raw ones are the same as at 1."""

_SAME = 1e-3
"""Two log-probabilities of the same token under the same distribution differ by less, in any precision."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]


_decode = msgspec.json.Decoder(_Completion).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class VllmDialect:
    """Requests and responses of vLLM."""

    model: str
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    path = "/v1/completions"
    update_modes = tuple(UpdateMode)
    constrains_output = True

    def __post_init__(self) -> None:
        if wrong := sorted(_OWN_FIELDS & self.extra_body.keys()):
            raise ConfigError(
                f"extra_body.{wrong[0]}: cannot be set here; accepted: any field but {', '.join(sorted(_OWN_FIELDS))}"
            )
        self._shaped  # noqa: B018 - raises for a value of the wrong type

    @cached_property
    def _shaped(self) -> Mapping[str, Any]:
        return shaping(self.extra_body)

    def request(self, partial: PartialCompletion) -> bytes:
        sampling = partial.sampling
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": partial.input_ids.tolist(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": partial.max_tokens,
            "stop_token_ids": partial.stop_ids,
            "logprobs": 0,
            "return_token_ids": True,
            **_NEUTRAL,
        }
        if sampling.stop:
            fields["stop"] = sampling.stop
        if partial.seed is not None:
            fields["seed"] = partial.seed
        if sampling.output is not None:
            fields["response_format"] = response_format(sampling.output)
        return _encode({**fields, **self.extra_body})

    def response(self, body: bytes, partial: PartialCompletion) -> Piece:
        choice = _choice(body)
        finish = FINISHES.get(choice.finish_reason or "")
        if finish is None:
            raise FormatError(f"finish_reason {choice.finish_reason!r}; accepted: {', '.join(FINISHES)}")
        if choice.prompt_token_ids is None:
            raise FormatError("no prompt_token_ids: this server ignores return_token_ids")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else None
        if choice.token_ids == [] and logprobs is None:
            logprobs = []  # aborted before its first token
        return check_piece(partial, choice.token_ids, logprobs, finish, seen=choice.prompt_token_ids)

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        return sent(sampling, self._shaped)

    def faithful(self, drawn: SamplingParams, processed: bool) -> bool:
        return processed or drawn.temperature == 0 or drawn == _OWN_DISTRIBUTION

    async def ask_processed(self, control: Control) -> bool:
        plain, hot = [await self._likeliest(control, temperature) for temperature in (1.0, _HOT)]
        return abs(plain - hot) > _SAME

    async def probe(self, control: Control) -> Capabilities:
        served = served_models(await control.get("/v1/models"))
        if self.model not in served:
            serves = name_some(served, self.model) or "no model that it names"
            raise ConfigError(f"model: {control.base_url} serves {serves}, not {self.model!r}")
        version = await control.get_or("/version", None)
        name = f"vLLM {version['version']}" if isinstance(version, dict) and "version" in version else "vLLM"
        can_update = [await control.serves(path) for path in ("/pause", "/collective_rpc", "/resume")]
        missing = ""
        exact = True
        try:
            processed = await self.ask_processed(control)
        except EngineError as error:
            exact = processed = False
            missing = f"it does not return token ids with log-probabilities ({one_line(str(error))}); use vLLM 0.10.2 or newer"
        if exact and not processed:
            missing = (
                "its log-probabilities are of the model's own distribution: at a temperature or top_p other than 1 "
                f"its trajectories are not trainable; start it with {PROCESSED_FLAG}"
            )
        if exact and (shaped := SamplingParams(**self._shaped).not_modelled) is not None:
            exact = False
            missing = f"extra_body changes the distribution ({shaped}), which is not modelled; leave that out"
        return Capabilities(
            engine=name,
            model=self.model,
            token_ids=exact,
            logprobs=exact,
            update_modes=tuple(UpdateMode) if all(can_update) else (),
            missing=missing,
        )

    async def label(self, control: Control) -> str | None:
        info = await control.get_or("/weight_info", None)
        return info.get("weight_version") if isinstance(info, dict) else None

    async def pause(self, control: Control, mode: UpdateMode) -> None:
        how = "wait" if mode is UpdateMode.DRAIN else "abort"
        await control.post(f"/pause?mode={how}&clear_cache=false", seconds=UPDATE_SECONDS)

    async def load(self, control: Control, weights: Weights) -> None:
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": folder_of(weights)}}
        await control.post("/collective_rpc", arguments, UPDATE_SECONDS)
        await control.post("/reset_prefix_cache", seconds=UPDATE_SECONDS)
        await control.post("/update_weight_version", {"new_version": str(weights.version)})

    async def resume(self, control: Control) -> None:
        await control.post("/resume")

    def with_adapter(self, body: bytes, name: str) -> bytes:
        return _encode({**msgspec.json.decode(body), "model": name})

    async def load_adapter(self, control: Control, name: str, folder: str) -> None:
        if await self.has_adapter(control, name):  # under its name it has the same content
            return
        fields = {"lora_name": name, "lora_path": folder}
        try:
            await control.post("/v1/load_lora_adapter", fields, UPDATE_SECONDS)
        except EngineError as error:
            if await control.serves("/v1/load_lora_adapter"):
                raise
            raise EngineError(
                f"{control.base_url}: takes no adapters; start it with {ADAPTER_FLAGS}"
            ) from error

    async def unload_adapter(self, control: Control, name: str) -> None:
        await control.post("/v1/unload_lora_adapter", {"lora_name": name}, UPDATE_SECONDS)

    async def has_adapter(self, control: Control, name: str) -> bool:
        return name in served_models(await control.get("/v1/models"))

    async def _likeliest(self, control: Control, temperature: float) -> float:
        """The log-probability of the likeliest first token that the server reports at a temperature."""
        partial = PartialCompletion(token_ids([1]), Sampling(temperature=temperature, max_tokens=1), seed=0)
        fields = msgspec.json.decode(self.request(partial))
        fields["logprobs"] = 1
        answer = await control.post(self.path, fields, UPDATE_SECONDS)
        body = _encode(answer)
        try:
            self.response(body, partial)
        except FormatError as error:
            raise EngineError(f"{control.url(self.path)}: not a completion: {error}") from error
        told = _choice(body).logprobs
        tops = told.top_logprobs if told is not None else None
        if not tops or not tops[0]:
            raise EngineError(f"{control.url(self.path)}: no top_logprobs in the answer")
        return max(tops[0].values())


def _choice(body: bytes) -> _Choice:
    try:
        return _decode(body).choices[0]
    except UNREADABLE as error:
        raise FormatError(one_line(str(error))) from error


class VllmPolicy(HttpEnginePolicy):
    """vLLM servers with one model. See `HttpEnginePolicy` for the guarantees and the other settings."""

    def __init__(
        self,
        servers: EngineServersConfig | str,
        model: str,
        renderer: Renderer,
        *,
        extra_body: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """`servers`: settings, or an address like `http://127.0.0.1:8000`; `model`: the server's name of the model."""
        super().__init__(servers, VllmDialect(model, extra_body or {}), renderer, **more)
