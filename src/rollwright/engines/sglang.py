"""SGLang's `/generate`, with token ids in and out.

Built from SGLang's documentation; it cannot be installed on a machine without a GPU, so the tests run it against
a small server that answers as documented. Log-probabilities are taken after the temperature and before top-p, so they are
those of the sampled distribution at top-p 1. A server started with `SGLANG_RETURN_ORIGINAL_LOGPROB` takes them before the
temperature, which is the same only at temperature 1; a probe tells the two apart. Each response names the weights that made
it.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from rollwright.engines.base import Capabilities, EngineError, Renderer, Sampling, UpdateMode, Weights
from rollwright.engines.dialect import FINISHES, UNREADABLE, UPDATE_SECONDS, Control, folder_of
from rollwright.engines.http_policy import HttpEnginePolicy
from rollwright.engines.openai_api import one_line
from rollwright.engines.partial import PartialCompletion, Piece, check_piece
from rollwright.engines.settings import EngineServersConfig
from rollwright.errors import FormatError
from rollwright.trajectory import SamplingParams, token_ids

ADAPTER_FLAGS = "--enable-lora --max-lora-rank R --lora-target-modules all"
_ALREADY = "already loaded"
"""In the refusal of an adapter that is there under the same name, and so has the same content."""

_HOT = 2.0
"""A temperature at which the probability of the likeliest token differs clearly from that at 1."""

_SAME = 1e-3
"""Two log-probabilities of the same token under the same distribution differ by less, in any precision."""

_ORIGINAL = (
    "; and they are taken before the temperature, or it does not tell: with a temperature other than 1 they are not "
    "trainable either; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
)


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    """Log-probability, id and optional text of each token."""
    output_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None
    """The same for the likeliest tokens at each position, if requested."""
    prompt_tokens: int | None = None
    weight_version: str | None = None
    e2e_latency: float | None = None
    """Seconds from the request's arrival to its last token."""


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True)
class SglangDialect:
    """Requests and responses of SGLang."""

    path = "/generate"
    update_modes = tuple(UpdateMode)
    constrains_output = True

    def request(self, partial: PartialCompletion) -> bytes:
        sampling: dict[str, Any] = {
            "temperature": partial.sampling.temperature,
            "top_p": partial.sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": partial.max_tokens,
            "stop_token_ids": partial.stop_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if partial.sampling.stop:
            sampling["stop"] = partial.sampling.stop
        if partial.seed is not None:
            sampling["sampling_seed"] = partial.seed
        if partial.sampling.output is not None:  # as text, unlike in the OpenAI-compatible API
            sampling["json_schema"] = msgspec.json.encode(partial.sampling.output.schema).decode()
        return msgspec.json.encode(
            {
                "input_ids": partial.input_ids.tolist(),
                "sampling_params": sampling,
                "return_logprob": True,
                "stream": False,
            }
        )

    def response(self, body: bytes, partial: PartialCompletion) -> Piece:
        try:
            answer = _decode(body)
        except UNREADABLE as error:
            raise FormatError(one_line(str(error))) from error
        meta = answer.meta_info
        finish = FINISHES.get(meta.finish_reason.type)
        if finish is None:
            raise FormatError(f"finish_reason {meta.finish_reason.type!r}; accepted: {', '.join(FINISHES)}")
        if meta.prompt_tokens is not None and meta.prompt_tokens != len(partial.input_ids):
            raise FormatError(
                f"the engine saw {meta.prompt_tokens} prompt tokens instead of {len(partial.input_ids)}"
            )
        made = meta.output_token_logprobs
        ids = None if made is None else [each[1] for each in made]
        if answer.output_ids is not None and ids is not None and answer.output_ids != ids:
            raise FormatError("output_ids and output_token_logprobs name different tokens")
        logprobs = None if made is None else [each[0] for each in made]
        piece = check_piece(partial, ids, logprobs, finish, label=meta.weight_version)
        return msgspec.structs.replace(piece, served=meta.e2e_latency)

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        return None

    def faithful(self, drawn: SamplingParams, processed: bool) -> bool:
        if drawn.temperature == 0:
            return True
        return drawn.top_p == 1 and (processed or drawn.temperature == 1)

    async def ask_processed(self, control: Control) -> bool:
        plain, hot = [await self._likeliest(control, temperature) for temperature in (1.0, _HOT)]
        return plain is not None and hot is not None and abs(plain - hot) > _SAME

    async def _likeliest(self, control: Control, temperature: float) -> float | None:
        """The log-probability of the likeliest first token that the server reports at a temperature; `None`: it reports none."""
        partial = PartialCompletion(token_ids([1]), Sampling(temperature=temperature, max_tokens=1), seed=0)
        fields = {**msgspec.json.decode(self.request(partial)), "top_logprobs_num": 1}
        answer = await control.post(self.path, fields, UPDATE_SECONDS)
        try:
            tops = msgspec.convert(answer, _Answer).meta_info.output_top_logprobs
        except msgspec.ValidationError as error:
            raise EngineError(
                f"{control.url(self.path)}: not a completion: {one_line(str(error))}"
            ) from error
        return tops[0][0][0] if tops and tops[0] else None

    async def probe(self, control: Control) -> Capabilities:
        info = await control.get("/get_model_info")
        if not isinstance(info, dict) or "model_path" not in info:
            raise EngineError(f"{control.url('/get_model_info')}: not SGLang's answer: {one_line(str(info))}")
        server = await control.get_or("/get_server_info", {})
        version = server.get("version") if isinstance(server, dict) else None
        paths = ("/pause_generation", "/update_weights_from_disk", "/continue_generation")
        can_update = [await control.serves(path) for path in paths]
        scaled = "" if await self.ask_processed(control) else _ORIGINAL
        return Capabilities(
            engine=f"SGLang {version}" if version else "SGLang",
            model=str(info["model_path"]),
            token_ids=True,
            logprobs=True,
            update_modes=tuple(UpdateMode) if all(can_update) else (),
            missing="its log-probabilities are taken before top_p: with a top_p other than 1 its trajectories are "
            f"not trainable; use top_p 1, or vLLM{scaled}",
        )

    async def label(self, control: Control) -> str | None:
        info = await control.get_or("/get_model_info", None)
        return info.get("weight_version") if isinstance(info, dict) else None

    async def pause(self, control: Control, mode: UpdateMode) -> None:
        if mode is not UpdateMode.DRAIN:  # SGLang's update itself waits for running calls
            await control.post("/pause_generation", {"mode": "abort"}, UPDATE_SECONDS)

    async def load(self, control: Control, weights: Weights) -> None:
        fields = {
            "model_path": folder_of(weights),
            "flush_cache": True,
            "weight_version": str(weights.version),
        }
        answer = await control.post("/update_weights_from_disk", fields, UPDATE_SECONDS)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            said = answer.get("message") if isinstance(answer, dict) else answer
            raise EngineError(f"{control.url('/update_weights_from_disk')}: {one_line(str(said))}")

    async def resume(self, control: Control) -> None:
        await control.post("/continue_generation")

    def with_adapter(self, body: bytes, name: str) -> bytes:
        return msgspec.json.encode({**msgspec.json.decode(body), "lora_path": name})

    async def load_adapter(self, control: Control, name: str, folder: str) -> None:
        await self._ask_adapter(control, "/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, control: Control, name: str) -> None:
        await self._ask_adapter(control, "/unload_lora_adapter", {"lora_name": name})

    async def has_adapter(self, control: Control, name: str) -> bool:
        """SGLang lists its adapters only in the answers to loading and unloading."""
        return False

    async def _ask_adapter(self, control: Control, path: str, fields: dict[str, str]) -> None:
        try:
            answer = await control.post(path, fields, UPDATE_SECONDS)
        except EngineError as error:
            if _ALREADY in str(error):
                return
            if await control.serves(path):
                raise
            raise EngineError(
                f"{control.base_url}: takes no adapters; start it with {ADAPTER_FLAGS}"
            ) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            said = str(answer.get("error_message"))
            if _ALREADY not in said:
                raise EngineError(f"{control.url(path)}: {one_line(said)}")


class SglangPolicy(HttpEnginePolicy):
    """SGLang servers with one model. See `HttpEnginePolicy` for the guarantees and the other settings."""

    def __init__(self, servers: EngineServersConfig | str, renderer: Renderer, **more: Any) -> None:
        """`servers`: settings, or an address like `http://127.0.0.1:30000`."""
        super().__init__(servers, SglangDialect(), renderer, **more)
