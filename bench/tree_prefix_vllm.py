"""What does the prefix cache of a served engine save, and how much more for trees than for chains?

    python bench/tree_prefix_vllm.py

SmolLM2-135M on two vLLM servers on the CPU, one with its prefix cache and one without, which work one at a time.
FrozenLake in groups of eight leaves, as chains and as trees. The lakes have no holes and a goal as far away as there are
turns, and no answer ends before its limit of tokens, so all leaves are equally long. Each arm begins with an empty
cache; arms take turns, and the figures are sums over the rounds. Engine time is the processor time of the process that
runs the model, which other work on the machine stretches little. Calls, tokens and hits are the server's own counters.

The CPU build of vLLM dies when it cuts the prompt of a request with a seed into pieces (chunked prefill), which happens
when the prompts that come together are longer than what it computes at a time. Here it computes as much at a time as all
its sequences can hold, so nothing is cut.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.cli.console import console
from rollwright.config import RunConfig, build
from rollwright.engines.base import Renderer
from rollwright.engines.rendering import make_renderer
from rollwright.engines.rendering.tokenizer import load_tokenizer
from rollwright.engines.vllm import VllmPolicy
from rollwright.run.run import Run
from rollwright.trajectory import Trajectory, leaves, path
from vllm_metrics import cpu_seconds, empty_cache, totals
from vllm_server import CONTEXT, MODEL, SEQUENCES, VllmServer, fetched_model, vllm_server

LEAVES = 8
TURNS = 4
ANSWER = 16
"""Tokens of every answer."""
TEMPERATURE = 1.5
"""High enough that two answers are hardly ever the same: these would be one turn, and a leaf would be missing."""
WIDTH, DEPTH = 2, 3
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "chain": (LEAVES, {"kind": "chain"}),
    "tree": (LEAVES // WIDTH**DEPTH, {"kind": "tree", "width": WIDTH, "depth": DEPTH, "branch": "fixed"}),
}
"""Rollouts in a group, and the strategy."""
NOTHING_CUT = f"--max-num-batched-tokens={CONTEXT * SEQUENCES}"
CACHE = {False: "--no-enable-prefix-caching", True: "--enable-prefix-caching"}
COUNTERS = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
)
MOST_TRIES = 2
"""Seeds for each round."""
WARM_UP = -1
"""Seed of a round that is not counted: a server's first calls cost more."""


@dataclass(frozen=True)
class Arm:
    shape: str
    cache: bool
    leaves: int
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    """Of the prompts, those found in the prefix cache."""
    cpu_seconds: float
    """Of the process that runs the model."""

    @property
    def cpu_per_leaf(self) -> float:
        return self.cpu_seconds / self.leaves


def configuration(shape: str, seed: int) -> RunConfig:
    group_size, strategy = SHAPES[shape]
    lake = {
        "max_steps": TURNS,
        "max_tokens_per_step": ANSWER,
        "env_config": {"p": 1.0, "min_distance": TURNS},
    }
    return build(
        {
            "name": "bench",
            "seed": seed,
            "strategy": strategy,
            "max_inflight": SEQUENCES,
            "sequence_length": CONTEXT,
            "custom_envs": {"FrozenLake": lake},
            "train_env_manager": {"num_env_groups": 1, "group_size": group_size, "tags": ["FrozenLake"]},
        }
    )


async def spent(server: VllmServer) -> list[float]:
    """Its counters and its processor time since it began."""
    return [*await totals(server, COUNTERS), cpu_seconds(server)]


async def played(server: VllmServer, renderer: Renderer, shape: str, cache: bool, seed: int) -> Arm | None:
    """One group; `None`: its leaves are not equal, so it compares with nothing."""
    never = {str(token): -100 for token in renderer.stop_ids}
    body = {"ignore_eos": True, "logit_bias": never, "temperature": TEMPERATURE}
    policy = VllmPolicy(server.url, MODEL, renderer, extra_body=body)
    async with Run(configuration(shape, seed), policy=policy) as run:
        if cache:
            await empty_cache(server)
        before = await spent(server)
        trajectories = (await run.get_batch()).trajectories
        after = await spent(server)
    calls, prompts, sampled, cached, seconds = (
        late - early for early, late in zip(before, after, strict=True)
    )
    if not equal_leaves(trajectories):
        return None
    return Arm(shape, cache, LEAVES, int(calls), int(prompts), int(sampled), int(cached), seconds)


def equal_leaves(trajectories: Sequence[Trajectory]) -> bool:
    lengths = [len(path(each.turns, leaf)) for each in trajectories for leaf in leaves(each.turns)]
    answers = {len(turn.sampled_ids) for each in trajectories for turn in each.turns}
    return lengths == [TURNS] * LEAVES and answers == {ANSWER}


async def measure(servers: dict[bool, VllmServer], renderer: Renderer, rounds: int) -> list[Arm]:
    """Rounds of all arms; one in which an answer came twice is played again with other seeds."""
    for cache, server in servers.items():
        await played(server, renderer, "tree", cache, WARM_UP)
    arms: list[Arm] = []
    for seed in range(rounds * MOST_TRIES):
        if len(arms) == rounds * len(SHAPES) * len(servers):
            break
        found = [
            await played(server, renderer, shape, cache, seed)
            for shape in SHAPES
            for cache, server in servers.items()
        ]
        whole = [each for each in found if each is not None]
        arms += whole if len(whole) == len(found) else []
    if not arms:
        raise SystemExit("no round had leaves of equal length")
    return arms


def summed(arms: Sequence[Arm]) -> Arm:
    first = arms[0]
    return Arm(
        first.shape,
        first.cache,
        sum(each.leaves for each in arms),
        sum(each.calls for each in arms),
        sum(each.prompt_tokens for each in arms),
        sum(each.sampled_tokens for each in arms),
        sum(each.cached_tokens for each in arms),
        sum(each.cpu_seconds for each in arms),
    )


def main(rounds: Annotated[int, typer.Option(min=1)] = 3) -> None:
    screen = console()
    folder = fetched_model()
    renderer = make_renderer(load_tokenizer(folder))
    with (
        tempfile.TemporaryDirectory() as scratch,
        screen.status("starting two vLLM servers, then playing …"),
        ExitStack() as stack,
    ):
        servers = {
            cache: stack.enter_context(vllm_server(folder, Path(scratch) / f"{cache}.txt", flag, NOTHING_CUT))
            for cache, flag in CACHE.items()
        }
        arms = asyncio.run(measure(servers, renderer, rounds))
    rounds = len(arms) // (len(SHAPES) * len(CACHE))
    sums = {
        (shape, cache): summed([each for each in arms if (each.shape, each.cache) == (shape, cache)])
        for shape in SHAPES
        for cache in CACHE
    }
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"SmolLM2-135M on vLLM (CPU), {rounds} groups of {LEAVES} leaves of {TURNS} turns",
        title_justify="left",
    )
    for name in ("shape", "prefix cache"):
        table.add_column(name)
    for name in ("leaves", "calls", "prompts", "in the cache", "sampled", "CPU s", "a leaf"):
        table.add_column(name, justify="right")
    for each in sums.values():
        table.add_row(
            each.shape,
            "on" if each.cache else "off",
            f"{each.leaves}",
            f"{each.calls}",
            f"{each.prompt_tokens:,}",
            f"{each.cached_tokens:,}",
            f"{each.sampled_tokens:,}",
            f"{each.cpu_seconds:.1f}",
            f"{each.cpu_per_leaf:.2f}",
        )
    screen.print(table)
    per_leaf = {key: each.cpu_per_leaf for key, each in sums.items()}
    with_cache = {shape: per_leaf[shape, True] / per_leaf[shape, False] for shape in SHAPES}
    as_tree = {cache: per_leaf["tree", cache] / per_leaf["chain", cache] for cache in CACHE}
    for shape, ratio in with_cache.items():
        screen.print(f"the cache takes a leaf of a {shape} to {ratio:.2f}×")
    for cache, ratio in as_tree.items():
        screen.print(
            f"{'with' if cache else 'without'} it a tree takes a leaf to {ratio:.2f}× that of a chain"
        )
    file = write_results(
        "tree_prefix_vllm",
        {
            "rounds": rounds,
            "leaves": LEAVES,
            "turns": TURNS,
            "arms": [{**asdict(each), "cpu_per_leaf": each.cpu_per_leaf} for each in sums.values()],
            "cached_to_uncached": with_cache,
            "tree_to_chain": {"cache": as_tree[True], "no_cache": as_tree[False]},
            "cpu_per_leaf_of_each_round": [
                {"shape": each.shape, "cache": each.cache, "cpu_per_leaf": each.cpu_per_leaf} for each in arms
            ],
        },
    )
    screen.print(f"written: {file.name}")


if __name__ == "__main__":
    typer.run(main)
