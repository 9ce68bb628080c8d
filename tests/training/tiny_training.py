"""The smallest real training run: a random byte-level Llama, a game it can learn, and the whole path between them."""

import asyncio
import multiprocessing
import time
from pathlib import Path
from typing import Any

from rollwright.config import RunConfig, build
from rollwright.engines.rendering.bytes import VOCABULARY_SIZE, BytesRenderer
from rollwright.engines.settings import TorchServingConfig
from rollwright.engines.torch import TorchPolicy
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.training import TrainingRun

NAME = "tiny"
TURNS = 2

PATIENCE = 600.0
"""Seconds after which something that was waited for will not come any more, on however slow a machine."""

PRELOADED = ["torch", "transformers", "rollwright.run.training", "rollwright.engines.torch"]
"""Imported once: a process that is killed and started again should not spend its life importing."""


class OddBytes:
    """Two turns; each is worth the share of odd characters in the answer. Chance gives a half."""

    prompts = PromptTemplates(system="", opening="{observation}", turn="{observation}")
    instruction = ""

    def __init__(self) -> None:
        self.turns = 0
        self.level = 0

    async def reset(self, seed: int) -> Reset:
        self.turns, self.level = 0, seed % 10
        return Reset(f"{self.level}", {})

    async def step(self, answer: str) -> Step:
        self.turns += 1
        reward = sum(ord(each) % 2 for each in answer) / max(len(answer), 1)
        valid = sum(map(ord, answer)) % 8 > 0
        return Step(
            f"{self.turns}", reward, self.turns == TURNS, False, {"success": reward > 0.5, "valid": valid}
        )

    async def close(self) -> None:
        """Holds nothing."""


def save_model(folder: Path) -> Path:
    tiny_llama(VOCABULARY_SIZE, hidden_size=16, layers=1, heads=2, max_length=64).save_pretrained(folder)
    return folder


def configuration(model: Path, *overrides: str, **more: Any) -> RunConfig:
    content = {
        "name": NAME,
        "max_steps": 6,
        "limits": {"lease_seconds": 1.0, "heartbeat_interval": 0.2, "max_attempts": 20},
        "custom_envs": {
            "OddBytes": {"env_type": "tiny_training:OddBytes", "max_steps": TURNS, "max_tokens_per_step": 4}
        },
        "train_env_manager": {"num_env_groups": 4, "group_size": 4, "tags": ["OddBytes"]},
        "training": {
            "model": str(model),
            "learning_rate": 3e-3,
            "checkpoint_steps": 4,
            "hand_over": "tensors",
        },
        **more,
    }
    return build(content, overrides)


def policy(model: Path) -> TorchPolicy:
    return TorchPolicy(load_model(model), BytesRenderer(), TorchServingConfig(batch_invariant=True))


async def train(runs: Path, config: RunConfig, model: Path) -> TrainingRun:
    """A new run, or the rest of the one that is there."""
    there = runs / config.name
    if resume := (there / "config.yaml").is_file():
        config, folder = RunReader(there).config, RunFolder.reopen(there)
    else:
        folder, config = RunFolder.create(runs, config)
    run = TrainingRun(config, folder, resume=resume, policy=policy(model), store=folder.store_address(None))
    try:
        await run.run()
    finally:
        folder.finish(run.summary())
    return run


def train_in_process(runs: Path, model: Path, more: dict[str, Any]) -> None:
    """What a process of its own does until it is killed."""
    asyncio.run(train(runs, configuration(model, **more), model))


def recorded(record: Path) -> int:
    return record.read_text(encoding="utf-8").count("\n") if record.is_file() else 0


def kill_after(runs: Path, model: Path, more: dict[str, Any], batches: int, seconds: float) -> bool:
    """Trains in a process that is killed so long after so many more batches; says whether it was still at work."""
    record = runs / NAME / "metrics.jsonl"
    wanted = min(recorded(record) + batches, more["max_steps"])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=train_in_process, args=(runs, model, more))
    process.start()
    give_up = time.monotonic() + PATIENCE
    while recorded(record) < wanted and process.is_alive():
        assert time.monotonic() < give_up, "waited in vain for batches"
        time.sleep(0.005)
    time.sleep(seconds)
    alive = process.is_alive()
    assert alive or process.exitcode == 0, "it ended by itself before it was killed"
    process.kill()
    process.join()
    return alive
