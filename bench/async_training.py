"""How much faster is training when rollouts go on meanwhile? Against the limit that no pipeline can beat.

    python bench/async_training.py

The real loop, scheduler and workers with a simulated engine of 64 slots, heavy-tailed answers and a train step that
takes a given time, on a virtual clock, so that the figures are exact and do not depend on the machine. Synchronous
and asynchronous runs train the same number of batches of the same size. With T_train = ratio × T_rollout in steady
state (the engine always full), the limit is (T_rollout with its barrier + T_train) / max(T_rollout in steady state,
T_train): the slower of the two is never idle.
"""

import asyncio
import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.aio import run_virtual
from rollwright.cli.console import console
from rollwright.config import RunConfig, build
from rollwright.rollout import Batch, Fate
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.simulation.players import SkilledPlayer
from rollwright.training.pipeline import Cadence, LengthBias, Pipeline, Stages
from rollwright.trajectory import Trajectory

SLOTS, SPEED = 64, 50.0
MEAN_TOKENS, SIGMA = 80.0, 1.0
BATCH, GROUP_SIZE = 256, 8
STEPS, WARM_UP = 40, 4
"""The first steps are not measured: no rollouts were under way before them, in either kind of run."""

RATIOS = (0.5, 1.0, 2.0)
"""T_train over T_rollout in steady state."""
AHEAD = (1, 2, 3)
"""`async_generation_ratio`: batches that rollouts may be ahead."""
TARGET = 0.95


@dataclass(frozen=True)
class Arm:
    """One run, in steady state."""

    ahead: int
    step_seconds: float
    occupancy: float
    """Of the engine's slots."""
    oldest: int
    """Most versions that a token was old at hand-over."""
    stale_share: float
    """Episodes that were opened and became too old."""
    length_ratio: float | None
    """Mean length trained over mean length generated."""


def engine() -> SimulatedEngine:
    lengths = LogNormalLength(MEAN_TOKENS, SIGMA, longest=1024)
    return SimulatedEngine(slots=SLOTS, tokens_per_second=SPEED, lengths=lengths, player=SkilledPlayer(0.7))


def configuration(ahead: int) -> RunConfig:
    return build(
        {
            "name": "bench",
            "max_steps": STEPS,
            "rollout_batch_size": BATCH,
            "async_generation_ratio": ahead,
            "max_inflight": SLOTS if ahead else BATCH,
            "limits": {"generate_timeout": 1e6, "episode_timeout": 1e6},
            "custom_envs": {"FrozenLake": {"max_tokens_per_step": 1024}},
            "train_env_manager": {
                "num_env_groups": BATCH // GROUP_SIZE * (1 + ahead),
                "group_size": GROUP_SIZE,
                "tags": ["FrozenLake"],
            },
        }
    )


async def measured(ahead: int, train_seconds: float) -> Arm:
    served = engine()
    clock = asyncio.get_running_loop().time
    ages: Counter[int] = Counter()
    bias = LengthBias()
    warm: list[Any] = []

    def record(step: int, batch: Batch, seconds: float) -> None:
        bias.add_trained(len(batch.trajectories), sum(each.sampled_tokens for each in batch.trajectories))
        for trajectory in batch.trajectories:
            for turn in trajectory.turns:
                ages.update({batch.version - run.version: run.count for run in turn.versions})

    async def train(step: int, batch: Batch) -> None:
        await asyncio.sleep(train_seconds)
        if step + 1 == WARM_UP:
            warm.append((clock(), served.usage()))

    async def update() -> None:
        served.set_version(served.version + 1)

    async def nothing(done: int) -> None:
        """There is no model to check or to keep."""

    def finished(rollout_id: str, encoded: bytes) -> None:
        bias.add_generated(Trajectory.from_bytes(encoded).sampled_tokens)

    async with Run(configuration(ahead), policy=served, on_finished=finished) as run:
        stages = Stages(run.get_batch, record, train, update, nothing, nothing)
        await Pipeline(Cadence(STEPS), stages).run()
        began, usage = warm[0]
        ledger = run.schedulers[0].ledger
        return Arm(
            ahead=ahead,
            step_seconds=(clock() - began) / (STEPS - WARM_UP),
            occupancy=served.occupancy(usage),
            oldest=max(ages),
            stale_share=ledger.counts[Fate.STALE] / ledger.opened,
            length_ratio=bias.ratio,
        )


def main() -> None:
    screen = console()
    rows: list[dict[str, Any]] = []
    with screen.status("training on a virtual clock …"):
        alone = run_virtual(measured(0, 0.0))
        barrier = alone.step_seconds
        steady = barrier * alone.occupancy
        for ratio in RATIOS:
            train_seconds = ratio * steady
            apart = run_virtual(measured(0, train_seconds))
            limit = (barrier + train_seconds) / max(steady, train_seconds)
            for ahead in AHEAD:
                arm = run_virtual(measured(ahead, train_seconds))
                speedup = apart.step_seconds / arm.step_seconds
                rows.append(
                    {
                        "ratio": ratio,
                        "train_seconds": train_seconds,
                        "synchronous_step_seconds": apart.step_seconds,
                        **asdict(arm),
                        "speedup": speedup,
                        "limit": limit,
                        "share": speedup / limit,
                    }
                )
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"batches of {BATCH}, {SLOTS} slots; a batch takes {barrier:.1f} s, {steady:.1f} s with the engine full",
        title_justify="left",
    )
    names = (
        "train/rollout",
        "ahead",
        "sync s",
        "async s",
        "speed-up",
        "limit",
        "share",
        "oldest",
        "stale",
        "length",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['ratio']:g}",
            str(row["ahead"]),
            f"{row['synchronous_step_seconds']:.1f}",
            f"{row['step_seconds']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['limit']:.2f}x",
            f"{row['share']:.3f}",
            str(row["oldest"]),
            f"{100 * row['stale_share']:.1f} %",
            f"{row['length_ratio']:.3f}",
        )
    screen.print(table)
    best = {ratio: max(row["share"] for row in rows if row["ratio"] == ratio) for ratio in RATIOS}
    met = all(share >= TARGET for share in best.values())
    kept = all(row["oldest"] <= math.ceil(row["ahead"]) for row in rows)
    screen.print(f"target >= {TARGET} of the limit at every ratio: {'met' if met else 'NOT met'}")
    screen.print(f"staleness bound, for every token: {'kept' if kept else 'NOT kept'}")
    file = write_results(
        "async_training",
        {
            "slots": SLOTS,
            "batch": BATCH,
            "steps": STEPS,
            "rollout_seconds_with_barrier": barrier,
            "rollout_seconds_steady": steady,
            "target": TARGET,
            "target_met": met,
            "bound_kept": kept,
            "arms": rows,
        },
    )
    screen.print(f"written: {file.name}")


if __name__ == "__main__":
    main()
