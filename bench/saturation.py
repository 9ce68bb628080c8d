"""How busy episodes keep a real engine, against a load generator that does nothing else.

    python bench/saturation.py

SmolLM2-135M on one vLLM server on the CPU. One arm plays FrozenLake episodes with rollwright. The other is a bare
loop of HTTP requests at the same concurrency: the same conversations turn by turn, each request with as many
prompt and sampled tokens as rollwright's had, and nothing between two turns. Both begin with an empty prefix cache;
arms take turns, and the share is of the sums. Figures of both arms suffer alike from whatever else runs.
"""

import asyncio
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.cli.console import console
from rollwright.config import build
from rollwright.engines.base import Renderer
from rollwright.engines.rendering import make_renderer
from rollwright.engines.rendering.tokenizer import load_tokenizer
from rollwright.engines.vllm import VllmPolicy
from rollwright.run.run import Run
from rollwright.trajectory import Trajectory
from vllm_metrics import empty_cache, totals
from vllm_server import MODEL, VllmServer, fetched_model, vllm_server

CONCURRENCY = 8
GROUPS, GROUP_SIZE = 4, 4
MAX_STEPS, MAX_TOKENS = 4, 24
TARGET = 0.95


@dataclass(frozen=True)
class Arm:
    name: str
    seconds: float
    tokens: int
    requests: int
    cache_hit_rate: float
    """Share of prompt tokens that the server found in its prefix cache."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


async def with_rollwright(server: VllmServer, renderer: Renderer) -> tuple[Arm, list[Trajectory]]:
    config = build(
        {
            "name": "saturation",
            "max_inflight": CONCURRENCY,
            "sequence_length": 1800,
            "train_env_manager": {"num_env_groups": GROUPS, "group_size": GROUP_SIZE, "tags": ["FrozenLake"]},
            "custom_envs": {"FrozenLake": {"max_steps": MAX_STEPS, "max_tokens_per_step": MAX_TOKENS}},
        }
    )
    policy = VllmPolicy(server.url, MODEL, renderer)
    await empty_cache(server)
    before = await cache_figures(server)
    start = time.perf_counter()
    async with Run(config, policy=policy) as run:
        batch = await run.get_batch()
    seconds = time.perf_counter() - start
    turns = sum(len(each.turns) for each in batch.trajectories)
    tokens = sum(each.sampled_tokens for each in batch.trajectories)
    rate = hit_rate(before, await cache_figures(server))
    return Arm("rollwright", seconds, tokens, turns, rate), list(batch.trajectories)


async def bare(server: VllmServer, episodes: list[Trajectory]) -> Arm:
    """The same requests without anything around them."""
    waiting = iter(episodes)
    seeds = count()  # the same seed twice would give two episodes of a group the same tokens, and cached ones
    tokens = requests = 0

    async def player(session: aiohttp.ClientSession) -> None:
        nonlocal tokens, requests
        for episode in waiting:
            ids: list[int] = []
            for turn in episode.turns:
                ids += turn.prompt_ids.tolist()
                made = await ask(session, server, ids, len(turn.sampled_ids), next(seeds))
                ids += made
                tokens += len(made)
                requests += 1

    await empty_cache(server)
    before = await cache_figures(server)
    start = time.perf_counter()
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(player(session) for _ in range(CONCURRENCY)))
    seconds = time.perf_counter() - start
    return Arm(
        "bare load generator", seconds, tokens, requests, hit_rate(before, await cache_figures(server))
    )


async def ask(
    session: aiohttp.ClientSession, server: VllmServer, ids: list[int], tokens: int, seed: int
) -> list[int]:
    body = {
        "model": MODEL,
        "prompt": ids,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": seed,
    }
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        answer = await response.json()
    return list(answer["choices"][0]["token_ids"])


async def cache_figures(server: VllmServer) -> tuple[float, float]:
    """Prompt tokens looked up in the prefix cache so far, and found there."""
    asked, found = await totals(server, ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"))
    return asked, found


def hit_rate(before: tuple[float, float], after: tuple[float, float]) -> float:
    asked, found = (later - earlier for earlier, later in zip(before, after, strict=True))
    return found / asked if asked else 0.0


async def measure(server: VllmServer, renderer: Renderer, rounds: int) -> list[Arm]:
    arms: list[Arm] = []
    for _ in range(rounds):
        ours, episodes = await with_rollwright(server, renderer)
        arms += [ours, await bare(server, episodes)]
    return arms


def summed(arms: list[Arm]) -> Arm:
    return Arm(
        arms[0].name,
        sum(each.seconds for each in arms),
        sum(each.tokens for each in arms),
        sum(each.requests for each in arms),
        sum(each.cache_hit_rate for each in arms) / len(arms),
    )


def main(rounds: Annotated[int, typer.Option(min=1)] = 3) -> None:
    screen = console()
    folder = fetched_model()
    renderer = make_renderer(load_tokenizer(folder))
    with (
        tempfile.TemporaryDirectory() as scratch,
        screen.status("starting vLLM, then playing …"),
        vllm_server(folder, Path(scratch) / "log.txt") as server,
    ):
        arms = asyncio.run(measure(server, renderer, rounds))
    ours, theirs = summed(arms[::2]), summed(arms[1::2])
    share = ours.tokens_per_second / theirs.tokens_per_second
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"SmolLM2-135M on vLLM (CPU), {CONCURRENCY} at a time",
        title_justify="left",
    )
    table.add_column("arm")
    for name in ("tokens/s", "tokens", "requests", "prefix cache hits"):
        table.add_column(name, justify="right")
    for each in (ours, theirs):
        table.add_row(
            each.name,
            f"{each.tokens_per_second:.1f}",
            f"{each.tokens:,}",
            f"{each.requests:,}",
            f"{each.cache_hit_rate:.1%}",
        )
    screen.print(table)
    screen.print(f"share {share:.3f}; target >= {TARGET}: {'met' if share >= TARGET else 'NOT met'}")
    file = write_results(
        "saturation",
        {
            "concurrency": CONCURRENCY,
            "episodes": GROUPS * GROUP_SIZE * rounds,
            "arms": [
                {**asdict(each), "tokens_per_second": each.tokens_per_second} for each in (ours, theirs)
            ],
            "rounds": [each.tokens_per_second for each in arms],
            "share": share,
            "target": TARGET,
        },
    )
    screen.print(f"written: {file.name}")


if __name__ == "__main__":
    typer.run(main)
