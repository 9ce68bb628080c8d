"""From a GGUF file to a folder as transformers saves a model: `config.json`, safetensors and the tokenizer.

The 4-bit weights are taken as they are and written in 32 bits: the result is the quantised model, exactly.
"""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollwright.models.loading import quiet_library

STAGES = ("read the tokenizer", "read the weights", "write the folder")


def convert_gguf(
    weights: Path,
    to: Path,
    *,
    rms_norm_eps: float,
    on_progress: Callable[[str, int, int | None], None],
) -> None:
    """Writes `to`. For Llama-like models."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    def stage(number: int) -> None:
        on_progress(f"convert: {STAGES[number]}", number, len(STAGES))

    folder, file = str(weights.parent), weights.name
    with (
        quiet_library(),
        contextlib.redirect_stderr(io.StringIO()),
    ):  # the reader of GGUF files has a bar of its own
        stage(0)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        stage(1)
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        settings = read.config.to_dict()
        settings.pop("quantization_config", None)
        config = LlamaConfig.from_dict({**settings, "rms_norm_eps": rms_norm_eps})
        # a model that came from a GGUF file refuses to be saved, so its weights go into one that did not
        make: Any = LlamaForCausalLM  # its constructor has no types
        model: LlamaForCausalLM = make(config)
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        stage(2)
        model.save_pretrained(str(to))
        tokenizer.save_pretrained(str(to))
    on_progress("convert", len(STAGES), len(STAGES))
