"""SGLang's `/generate`, with token ids in and out.

Built from SGLang's documentation; it cannot be installed on a machine without a GPU, so the tests run it against
a small server that answers as documented. Log-probabilities are taken after the temperature and before top-p:
they are those of the sampled distribution at top-p 1. Each answer names the weights that made it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollwright.errors import FormatError
from rollwright.policies.base import Capabilities, EngineError, Renderer, Sampling, UpdateMode, Weights
from rollwright.policies.engines.dialect import FINISHES, UNREADABLE, UPDATE_SECONDS, Control, folder_of
from rollwright.policies.engines.pieces import Ask, Piece, checked
from rollwright.policies.engines.policy import EnginePolicy
from rollwright.policies.openai_api import one_line
from rollwright.trajectory import SamplingParams


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    """Log-probability, id and perhaps text of each token."""
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
    path = "/generate"
    update_modes = tuple(UpdateMode)

    def request(self, ask: Ask) -> bytes:
        sampling: dict[str, Any] = {
            "temperature": ask.sampling.temperature,
            "top_p": ask.sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": ask.max_tokens,
            "stop_token_ids": ask.stop_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if ask.sampling.stop:
            sampling["stop"] = ask.sampling.stop
        if ask.seed is not None:
            sampling["sampling_seed"] = ask.seed
        return msgspec.json.encode(
            {
                "input_ids": ask.ids.tolist(),
                "sampling_params": sampling,
                "return_logprob": True,
                "stream": False,
            }
        )

    def response(self, body: bytes, ask: Ask) -> Piece:
        try:
            answer = _decode(body)
        except UNREADABLE as error:
            raise FormatError(one_line(str(error))) from error
        meta = answer.meta_info
        finish = FINISHES.get(meta.finish_reason.type)
        if finish is None:
            raise FormatError(f"finish_reason {meta.finish_reason.type!r}; accepted: {', '.join(FINISHES)}")
        if meta.prompt_tokens is not None and meta.prompt_tokens != len(ask.ids):
            raise FormatError(f"the engine saw {meta.prompt_tokens} prompt tokens instead of {len(ask.ids)}")
        made = meta.output_token_logprobs
        ids = None if made is None else [each[1] for each in made]
        if answer.output_ids is not None and ids is not None and answer.output_ids != ids:
            raise FormatError("output_ids and output_token_logprobs name different tokens")
        logprobs = None if made is None else [each[0] for each in made]
        piece = checked(ask, ids, logprobs, finish, label=meta.weight_version)
        return msgspec.structs.replace(piece, served=meta.e2e_latency)

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        return None

    def faithful(self, drawn: SamplingParams, processed: bool) -> bool:
        return drawn.top_p == 1 or drawn.temperature == 0

    async def processed(self, control: Control) -> bool:
        return False

    async def probe(self, control: Control) -> Capabilities:
        info = await control.get("/get_model_info")
        if not isinstance(info, dict) or "model_path" not in info:
            raise EngineError(f"{control.url('/get_model_info')}: not SGLang's answer: {one_line(str(info))}")
        server = await control.get_or("/get_server_info", {})
        version = server.get("version") if isinstance(server, dict) else None
        paths = ("/pause_generation", "/update_weights_from_disk", "/continue_generation")
        can_update = [await control.serves(path) for path in paths]
        return Capabilities(
            engine=f"SGLang {version}" if version else "SGLang",
            model=str(info["model_path"]),
            token_ids=True,
            logprobs=True,
            update_modes=tuple(UpdateMode) if all(can_update) else (),
            missing="its log-probabilities are taken before top_p: with a top_p other than 1 its trajectories are "
            "not trainable; use top_p 1, or vLLM",
        )

    async def label(self, control: Control) -> str | None:
        info = await control.get_or("/get_model_info", None)
        return info.get("weight_version") if isinstance(info, dict) else None

    async def pause(self, control: Control, mode: UpdateMode) -> None:
        if mode is not UpdateMode.DRAIN:  # an update by itself waits for the calls under way
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


class SglangPolicy(EnginePolicy):
    """SGLang servers with one model. See `EnginePolicy` for what always holds, and for the other settings."""

    def __init__(self, base_urls: str | Sequence[str], renderer: Renderer, **settings: Any) -> None:
        """`base_urls`: like `http://127.0.0.1:30000`."""
        super().__init__(base_urls, SglangDialect(), renderer, **settings)
