"""Run in a process of its own: prints the memory that a model really took, in bytes beside the libraries, as JSON.

`python memory_probe.py FOLDER CALLS LENGTH TRAIN_TOKENS`
"""

import asyncio
import json
import resource
import sys
from pathlib import Path
from typing import Any

from rollwright.engines.base import Prompt, Sampling
from rollwright.engines.settings import TorchServingConfig
from rollwright.engines.torch import TorchPolicy
from rollwright.models.loading import load_model
from rollwright.training.rows import Row
from rollwright.training.trainer import Trainer, TrainerSettings
from rollwright.trajectory import floats, token_ids

ROW = 128
"""Tokens of a training row."""


class NoText:
    stop_ids = ()

    def decode(self, ids: Any) -> str:
        return ""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """Not `ru_maxrss`, which begins with what the process had that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def play(policy: TorchPolicy, calls: int, length: int, vocabulary: int) -> None:
    def prompt(call: int) -> Prompt:
        ids = token_ids([(call * 131 + place) % vocabulary for place in range(length - 16)])
        return Prompt(str(call), (call,), (), ids=ids)

    sampling = Sampling(max_tokens=16)
    await asyncio.gather(*(policy.generate(prompt(call), sampling) for call in range(calls)))
    await policy.close()


def rows(tokens: int, vocabulary: int) -> list[Row]:
    found = []
    for number in range(2 * tokens // ROW):
        ids = token_ids([(number * 31 + place) % vocabulary for place in range(ROW)])
        ones = floats([0.0] + [1.0] * (ROW - 1))
        advantages = floats([0.0] + [1.0 if number % 2 else -1.0] * (ROW - 1))
        mask, versions = bytes([0] + [1] * (ROW - 1)), token_ids([0] * ROW)
        found.append(
            Row(
                f"r{number}",
                f"g{number // 2}",
                ids,
                mask,
                floats([0.0] + [-1.0] * (ROW - 1)),
                versions,
                ones,
                advantages,
            )
        )
    return found


def main() -> None:
    folder, calls, length, tokens = sys.argv[1], *map(int, sys.argv[2:])
    import transformers

    transformers.LlamaForCausalLM  # noqa: B018 — imported on first use
    libraries = resident()
    model = load_model(folder)
    vocabulary = model.config.vocab_size
    asyncio.run(
        play(TorchPolicy(model, NoText(), TorchServingConfig(prefix_cache_mb=0)), calls, length, vocabulary)
    )
    played = peak()
    settings = TrainerSettings(learning_rate=1e-5, tokens_per_micro_batch=tokens, max_logprob_gap=1e9)
    trainer = Trainer(load_model(folder), settings)
    for _ in range(2):  # from the second on, the optimiser's memories are there too
        trainer.step(rows(tokens, vocabulary))
    print(json.dumps({"libraries": libraries, "played": played - libraries, "trained": peak() - libraries}))


if __name__ == "__main__":
    main()
