"""The choice of a model from the pools by the memory that it needs, as pure code except for reading model files.

Always true: the same seed, pools, needs and free memory give the same choice; a chosen model is expected to fit with room to
spare; every candidate is listed with the reason why it was chosen or skipped.

The need is estimated before a model is loaded or even downloaded. The minimum covers the weights, buffers of a forward pass
and the keys and values of a few calls; training adds the trainer's weights, gradients, both moments of Adam, a copy for
publishing weights, the base model if the loss uses it, and the activations of a micro-batch. Free memory beyond the minimum
holds the keys and values of further calls, which decides how many are served at once. Sizes of a model on this machine are
read from its files, those of the shipped pools are known, and others are guessed, on the high side, from the number in the
name. The constants are measured; `tests/models/test_memory_needs.py` measures them again.
"""

import json
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError
from rollwright.hardware import gigabytes
from rollwright.rng import digest

FLOAT = 4
"""Bytes of a trainer's float."""

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

LOGIT_COPIES = 6
"""Copies of a micro-batch's logits while the loss and its gradient are computed."""

WIDTHS_PER_LAYER, INNERS_PER_LAYER = 19, 5
"""Activations per token and layer that are kept for the backward pass: of the model's width, and of the MLP's inner width."""

PASS_TOKENS = 2200
"""Tokens of one forward pass during rollouts: `TOKENS_PER_STEP` of the torch policy, with padding."""

SAMPLING_COPIES = 9
"""Copies of the logits of one call's next token, counted in floats: some are doubles."""

CACHE_SLACK = 1.6
"""Overhead factor of keys and values: growing copies a layer at a time, and freed memory is fragmented."""

LEAST_CALLS = 4
"""Calls of full length that must fit at once (or the most concurrent ones, if fewer): otherwise a model is too slow to
choose."""

LIBRARIES = 500 << 20
"""Bytes of the process without a model: torch, transformers, and the rest of this package."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide how much memory it needs."""

    parameters: int
    vocabulary: int
    width: int
    layers: int
    cache_width: int
    """Width of one layer's keys, and of its values: key-value heads times head size."""
    inner: int
    """Inner width of the MLP."""
    source: str
    """Where these sizes come from."""


@dataclass(frozen=True)
class Use:
    """The intended use of a model."""

    dtype: str = "float32"
    concurrent: int = 32
    """Most calls in flight."""
    length: int = 1024
    """Most tokens of one call."""
    cache_bytes: int = 0
    """Most bytes of cached keys and values that no call uses."""
    train_tokens: int = 0
    """Tokens of a micro-batch; 0: it is not trained."""
    lora: bool = False
    reference: bool = False
    """Whether the loss uses the base model."""


@dataclass(frozen=True)
class MemoryNeed:
    """Estimated memory, in bytes."""

    weights: int
    computing: int
    """Buffers of a forward pass during rollouts."""
    training: int
    """The trainer's copies of weights, gradients and optimiser moments."""
    activations: int
    per_call: int
    """One call of full length: keys and values, and the logits of its next token."""
    most_calls: int
    """Most concurrent calls."""
    kept_cache: int
    """Most bytes of cached keys and values that no call uses."""

    @property
    def fixed(self) -> int:
        return LIBRARIES + self.weights + self.computing + self.training + self.activations

    @property
    def total(self) -> int:
        """The minimum for this use."""
        return self.fixed + min(LEAST_CALLS, self.most_calls) * self.per_call

    def calls(self, memory: int) -> int:
        """Calls of full length that can be served at once with this total memory."""
        room = memory - self.fixed - self.kept(memory)
        return max(1, min(self.most_calls, room // self.per_call))

    def cache_room(self, memory: int) -> int:
        """Bytes for keys and values of the calls being served, with this total memory; at least one call fits."""
        return int(max(self.per_call, memory - self.fixed - self.kept(memory)) / CACHE_SLACK)

    def kept(self, memory: int) -> int:
        """Bytes for cached keys and values that no call uses: at most a quarter of the surplus."""
        return max(0, min(self.kept_cache, (memory - self.total) // 4))


KNOWN = {
    "Gensyn/Qwen2.5-0.5B-Instruct": ModelShape(494_032_768, 151_936, 896, 24, 128, 4864, "known"),
    "Qwen/Qwen3-0.6B": ModelShape(596_049_920, 151_936, 1024, 28, 1024, 3072, "known"),
    "Gensyn/Qwen2.5-1.5B-Instruct": ModelShape(1_543_714_304, 151_936, 1536, 28, 256, 8960, "known"),
    "nvidia/AceInstruct-1.5B": ModelShape(1_543_714_304, 151_936, 1536, 28, 256, 8960, "known"),
    "dnotitia/Smoothie-Qwen3-1.7B": ModelShape(1_720_574_976, 151_936, 2048, 28, 1024, 6144, "known"),
    "smollm2": ModelShape(134_515_008, 49_152, 576, 30, 192, 1536, "known"),
}
"""Sizes of the shipped pools' models, as published."""

_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)\s?([BM])(?![A-Za-z0-9])", re.IGNORECASE)


def need_of(shape: ModelShape, use: Use) -> MemoryNeed:
    """Estimate the memory that a model of this shape needs for this use."""
    size = SIZES[use.dtype]
    cache = 2 * shape.layers * shape.cache_width * size * use.length
    mask = PASS_TOKENS * use.length * (size + 1)
    parts = {
        "weights": shape.parameters * size,
        "computing": PASS_TOKENS * size * (3 * shape.inner + 8 * shape.width) + mask,
        "per_call": int(CACHE_SLACK * cache) + SAMPLING_COPIES * FLOAT * shape.vocabulary,
        "most_calls": use.concurrent,
        "kept_cache": use.cache_bytes,
    }
    if not use.train_tokens:
        return MemoryNeed(training=0, activations=0, **parts)
    # With LoRA: the base weights, and the merged copy that is published.
    copies = 2 if use.lora else 5 + use.reference
    in_layers = shape.layers * (WIDTHS_PER_LAYER * shape.width + INNERS_PER_LAYER * shape.inner)
    per_token = FLOAT * (LOGIT_COPIES * shape.vocabulary + in_layers)
    training = copies * shape.parameters * FLOAT
    return MemoryNeed(training=training, activations=per_token * use.train_tokens, **parts)


def shape_of(model: str, folder: Path | None) -> ModelShape | None:
    """The sizes of a model, read from `folder` if it is on this machine; `None` if they are unknown."""
    if folder is not None:
        return _shape_in(folder)
    if model in KNOWN:
        return KNOWN[model]
    if (found := _IN_NAME.search(model)) is None:
        return None
    parameters = int(float(found[1]) * (1_000_000_000 if found[2] in "bB" else 1_000_000))
    return ModelShape(parameters, 151_936, 2048, 28, 1024, 8192, "guessed from the name")


def _shape_in(folder: Path) -> ModelShape | None:
    try:
        settings: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = int(settings["num_attention_heads"])
        width = int(settings["hidden_size"])
        head = int(settings.get("head_dim") or width // heads)
        return ModelShape(
            parameters=sum(_parameters(file) for file in sorted(folder.glob("*.safetensors"))),
            vocabulary=int(settings["vocab_size"]),
            width=width,
            layers=int(settings["num_hidden_layers"]),
            cache_width=int(settings.get("num_key_value_heads") or heads) * head,
            inner=int(settings.get("intermediate_size") or 4 * width),
            source="read from its files",
        )
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _parameters(file: Path) -> int:
    """Number of parameters by the header of a safetensors file: eight bytes of length, then JSON."""
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        header: dict[str, Any] = json.loads(content.read(min(length, 100 << 20)))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for each in tensor["shape"]:
                count *= int(each)
            total += count
    return total


ROOM = 0.9
"""Share of the free memory that a model may need: other processes run too, and needs are estimates."""


@dataclass(frozen=True)
class ModelChoice:
    """A chosen model with the reasons."""

    model: str
    pool: str
    need: int
    """Estimated minimum in bytes."""
    reasons: tuple[str, ...]
    """One line for each candidate, in the order of the pools, then the decision."""


def choose_model(
    pools: Mapping[str, Sequence[str]],
    need: Callable[[str], MemoryNeed | None],
    free: int | None,
    seed: int,
    *,
    below: int | None = None,
    out_of_reach: Collection[str] = (),
) -> ModelChoice:
    """Choose by the seed from the first pool with models that fit. `below`: only models that need fewer bytes.
    `out_of_reach`: models that are neither on this machine nor can be fetched now."""
    reasons: list[str] = []
    for pool, models in pools.items():
        fitting: dict[str, MemoryNeed] = {}
        for model in models:
            needed = need(model)
            why = "is not on this machine, and cannot be fetched now" if model in out_of_reach else None
            why = why or _reason_to_skip(needed, free, below)
            reasons.append(f"{model}: {_describe_need(needed)}{f'; {why}' if why else ''}")
            if why is None and needed is not None:
                fitting[model] = needed
        if fitting:
            names = sorted(fitting)
            model = names[digest(seed, "model pool", pool, *names) % len(names)]
            room = "free memory is unknown" if free is None else f"{gigabytes(free)} are free"
            reasons.append(
                f"chosen: {model} of {pool}, by seed {seed} from {len(names)} that fit; {room}"
                f"{_describe_calls(fitting[model], free)}"
            )
            return ModelChoice(model, pool, fitting[model].total, tuple(reasons))
    away = "; fetch one while there is a network: `rollwright model fetch smollm2`" if out_of_reach else ""
    raise ConfigError(
        f"policy.model: no model of {', '.join(pools)} fits ({'; '.join(reasons)}; "
        f"{'unknown' if free is None else gigabytes(free)} free); free some memory, make "
        "training.tokens_per_micro_batch or sequence_length smaller, use training.lora, or add a smaller model such as "
        f"`smollm2` to the pool{away}"
    )


def _describe_need(need: MemoryNeed | None) -> str:
    return "its size is not known" if need is None else f"needs {gigabytes(need.total)}"


def _describe_calls(need: MemoryNeed, free: int | None) -> str:
    if free is None:
        return ""
    return f", enough to serve {need.calls(int(ROOM * free)):,} calls of full length at once"


def _reason_to_skip(need: MemoryNeed | None, free: int | None, below: int | None) -> str | None:
    """Why a model is not chosen; `None`: it fits."""
    if need is None:
        return "so it is skipped; fetch it first, then its size is read from its files"
    if below is not None and need.total >= below:
        return "no less than the model that ran out of memory"
    if free is not None and need.total > ROOM * free:
        return f"more than {ROOM:.0%} of the free memory"
    return None
