"""What does an engine's prefix cache save, and how much more for trees than for chains?

    python bench/tree_prefix.py

The engine is the one in this process, with a Llama of random weights: what has to be computed depends on the shape of
play alone, and all paths are equally long, because such a model never names a move. FrozenLake in groups of eight leaves,
as chains and as trees, with the engine's prefix cache and without; without it, calls that are served at the same time
still share what they have in common. Counted are the tokens that went through the model and those whose keys and values
were at hand; beside them stands the processor time.
"""

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.cli.console import console
from rollwright.config import RunConfig, build
from rollwright.engines.rendering import make_renderer
from rollwright.engines.settings import TorchServingConfig
from rollwright.engines.torch import TorchPolicy
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.run.run import Run
from rollwright.trajectory import leaves

LEAVES = 8
TURNS = 4
ANSWER = 16
"""Most tokens of one answer."""
WIDTH, DEPTH = 2, 3
VOCABULARY, WIDE, LAYERS = 2048, 256, 8
"""About 10M parameters: large enough that the model is what takes the time."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "environments.md"
"""The tokenizer is trained on it."""
CACHE_MB = 512
"""More than all sequences of an arm take."""
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "chain": (LEAVES, {"kind": "chain"}),
    "tree": (LEAVES // WIDTH**DEPTH, {"kind": "tree", "width": WIDTH, "depth": DEPTH, "branch": "fixed"}),
}
"""Rollouts in a group, and the strategy."""


@dataclass(frozen=True)
class Figures:
    shape: str
    cache: bool
    leaves: int
    calls: int
    prompt_tokens: int
    """Of all prompts, as the model saw them."""
    sampled_tokens: int
    fed_tokens: int
    """That went through the model."""
    reused_tokens: int
    cpu_seconds: float

    @property
    def fed_per_leaf(self) -> float:
        return self.fed_tokens / self.leaves


def configuration(shape: str) -> RunConfig:
    group_size, strategy = SHAPES[shape]
    return build(
        {
            "name": "bench",
            "strategy": strategy,
            "max_inflight": 64,
            "custom_envs": {"FrozenLake": {"max_steps": TURNS, "max_tokens_per_step": ANSWER}},
            "train_env_manager": {"num_env_groups": 1, "group_size": group_size, "tags": ["FrozenLake"]},
        }
    )


async def measured(shape: str, cache: bool) -> Figures:
    tokenizer = tiny_tokenizer([PAGE.read_text(encoding="utf-8")], VOCABULARY)
    model = tiny_llama(len(tokenizer), hidden_size=WIDE, layers=LAYERS, max_length=4096)
    policy = TorchPolicy(
        model, make_renderer(tokenizer), TorchServingConfig(prefix_cache_mb=CACHE_MB if cache else 0)
    )
    counters = policy.counters
    async with Run(configuration(shape), policy=policy) as run:
        began = time.process_time()
        trajectories = (await run.get_batch()).trajectories
        spent = time.process_time() - began
    return Figures(
        shape,
        cache,
        sum(len(leaves(each.turns)) for each in trajectories),
        counters.calls,
        sum(turn.prompt_tokens * turn.count for each in trajectories for turn in each.turns),
        counters.sampled_tokens,
        counters.fed_tokens,
        counters.reused_tokens,
        spent,
    )


def main() -> None:
    screen = console()
    results: list[Figures] = []
    with screen.status("playing …"):
        for shape in SHAPES:
            for cache in (False, True):
                results.append(asyncio.run(measured(shape, cache)))
    table = Table(
        box=box.SIMPLE_HEAD, title=f"groups of {LEAVES} leaves of {TURNS} turns", title_justify="left"
    )
    for name in ("shape", "prefix cache"):
        table.add_column(name)
    for name in ("leaves", "calls", "prompts", "sampled", "through the model", "a leaf", "reused", "CPU s"):
        table.add_column(name, justify="right")
    for each in results:
        table.add_row(
            each.shape,
            "on" if each.cache else "off",
            f"{each.leaves}",
            f"{each.calls}",
            f"{each.prompt_tokens:,}",
            f"{each.sampled_tokens:,}",
            f"{each.fed_tokens:,}",
            f"{each.fed_per_leaf:,.0f}",
            f"{each.reused_tokens:,}",
            f"{each.cpu_seconds:.1f}",
        )
    screen.print(table)
    rows = [{**asdict(each), "fed_per_leaf": each.fed_per_leaf} for each in results]
    file = write_results("tree_prefix", {"leaves": LEAVES, "turns": TURNS, "arms": rows})
    screen.print(f"written: {file.name}")


if __name__ == "__main__":
    main()
