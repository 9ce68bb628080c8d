"""How much memory a model needs for what is to be done with it, estimated before it is loaded or even downloaded.

The parts: weights to play with, keys and values of the calls in flight, and for training the trainer's own weights,
gradients, both of Adam's memories, a copy for handing weights over, the base model where the loss looks at it, and what a
micro-batch leaves on the way. Of a model on this machine the sizes are read from its files, of the shipped pools they are
known, of others they are guessed from the number in the name, on the high side.
"""

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOAT = 4
"""Bytes of what a trainer computes with."""

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

LOGIT_COPIES = 3
"""Of a micro-batch's logits: as computed, as float, and their gradient."""

WIDTHS_PER_LAYER = 20
"""Tensors of the model's width that one token leaves in one layer for the way back; a Llama's is 16 to 20."""

LIBRARIES = 700 << 20
"""Bytes of the process without a model: torch, transformers, and the rest of this package."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides how much memory it needs."""

    parameters: int
    vocabulary: int
    width: int
    layers: int
    cache_width: int
    """Of one layer's keys, and of its values: heads for them times their size."""
    source: str
    """Where these figures come from, for people."""


@dataclass(frozen=True)
class Use:
    """What is to be done with a model."""

    dtype: str = "float32"
    concurrent: int = 32
    """Calls in flight."""
    length: int = 1024
    """Tokens of each at most."""
    cache_bytes: int = 0
    """For keys and values that no call uses just now."""
    train_tokens: int = 0
    """In a micro-batch; 0: it is not trained."""
    lora: bool = False
    reference: bool = False
    """Whether the loss looks at the base model."""


@dataclass(frozen=True)
class MemoryNeed:
    """In bytes."""

    weights: int
    cache: int
    training: int
    activations: int

    @property
    def total(self) -> int:
        return LIBRARIES + self.weights + self.cache + self.training + self.activations


KNOWN = {
    "Gensyn/Qwen2.5-0.5B-Instruct": ModelShape(494_032_768, 151_936, 896, 24, 128, "known"),
    "Qwen/Qwen3-0.6B": ModelShape(596_049_920, 151_936, 1024, 28, 1024, "known"),
    "Gensyn/Qwen2.5-1.5B-Instruct": ModelShape(1_543_714_304, 151_936, 1536, 28, 256, "known"),
    "nvidia/AceInstruct-1.5B": ModelShape(1_543_714_304, 151_936, 1536, 28, 256, "known"),
    "dnotitia/Smoothie-Qwen3-1.7B": ModelShape(1_720_574_976, 151_936, 2048, 28, 1024, "known"),
}
"""The shipped pools, as their families publish them."""

_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)\s?([BM])(?![A-Za-z0-9])", re.IGNORECASE)


def need_of(shape: ModelShape, use: Use) -> MemoryNeed:
    size = SIZES[use.dtype]
    cache = 2 * shape.layers * shape.cache_width * size * use.concurrent * use.length + use.cache_bytes
    if not use.train_tokens:
        return MemoryNeed(shape.parameters * size, cache, 0, 0)
    frozen = shape.parameters * FLOAT
    # of adapters only the weights count, and these merged for handing over
    copies = 2 if use.lora else 5 + use.reference
    per_token = LOGIT_COPIES * shape.vocabulary + WIDTHS_PER_LAYER * shape.width * shape.layers
    return MemoryNeed(shape.parameters * size, cache, copies * frozen, per_token * FLOAT * use.train_tokens)


def shape_of(model: str, folder: Path | None) -> ModelShape | None:
    """`folder`: where the model lies, if it is on this machine. `None`: nothing tells how large it is."""
    if folder is not None:
        return _shape_in(folder)
    if model in KNOWN:
        return KNOWN[model]
    if (found := _IN_NAME.search(model)) is None:
        return None
    parameters = int(float(found[1]) * (1_000_000_000 if found[2] in "bB" else 1_000_000))
    return ModelShape(parameters, 151_936, 2048, 28, 1024, "guessed from the name")


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
            source="read from its files",
        )
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _parameters(file: Path) -> int:
    """Of a safetensors file, by its header: eight bytes of length, then JSON."""
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
