"""What does the trainer save where rows share a prefix? One batch, every row by itself against rows joined.

    python bench/prefixes.py

The language model's lake (`configs/smollm2_frozen_lake.yaml`, model fetched before), the demo's lake, and rows that share
nothing. A batch is played once; both arms compute the gradient of the same rows with one thread, in turns, and CPU time
counts: from the rows to the gradient, and of the whole step, which has the optimiser too. Also noted is how far the two
gradients are apart, relative to their norm.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # two threads on two busy cores wait for each other

import torch
from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.cli.console import console
from rollwright.config import RunConfig, load
from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama
from rollwright.rng import generator
from rollwright.run.build_training import make_training_advantage, training_of
from rollwright.run.run import Run
from rollwright.training.gradients import add_gradients
from rollwright.training.micro_batches import pack
from rollwright.training.model import TrainedModel
from rollwright.training.rows import Row, build_rows
from rollwright.training.settings import TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import floats, token_ids

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3


def played(config: RunConfig) -> list[Row]:
    """The rows of the first batch."""

    async def play() -> list[Row]:
        async with Run(config) as run:
            batch = await run.get_batch()
        groups = [group.trajectories for group in batch.groups]
        return build_rows(groups, make_training_advantage(training_of(config)))

    return asyncio.run(play())


def unshared(vocabulary: int) -> list[Row]:
    """Rows of different lengths without a common token at the beginning."""
    dice = generator("bench", "prefixes")
    rows = []
    for number in range(64):
        size = dice.randint(40, 120)
        ids = [number, *(dice.randrange(vocabulary) for _ in range(size))]
        mask = bytes([0] * (len(ids) - 10) + [1] * 10)
        marked = floats(map(float, mask))
        zeros = token_ids([0] * len(ids))
        rows.append(
            Row(
                f"r{number}",
                f"g{number}",
                token_ids(ids),
                mask,
                floats([-1.0] * len(ids)),
                zeros,
                marked,
                marked,
            )
        )
    return rows


def compared(
    make: Callable[[], Any], settings: TrainerSettings, rows: Sequence[Row], rounds: int
) -> dict[str, Any]:
    """`make` loads the model anew, so that both arms begin with the same weights."""
    arms = {share: settings.model_copy(update={"share_prefixes": share}) for share in (False, True)}
    packed = [pack(row) for row in rows if any(row.mask)]
    model = TrainedModel(make(), arms[True])
    cost = model.tokens_per_pair
    seconds: dict[bool, list[float]] = {False: [], True: []}
    tokens: dict[bool, int] = {}
    gradients: dict[bool, list[torch.Tensor]] = {}
    for _ in range(rounds):
        for share in (False, True):
            model.tokens_per_pair = cost if share else None
            model.module.zero_grad(set_to_none=True)
            began = time.process_time()
            tally = add_gradients(
                model, packed, settings.loss, tokens_per_micro_batch=settings.tokens_per_micro_batch
            )
            seconds[share].append(time.process_time() - began)
            tokens[share] = tally.computed
            gradients[share] = [each.grad.clone() for each in model.trained_parameters().values()]
    apart = sum(
        float((one - two).double().square().sum()) for one, two in zip(*gradients.values(), strict=True)
    )
    norm = sum(float(each.double().square().sum()) for each in gradients[False])
    steps = {}
    for share, arm in arms.items():
        trainer = Trainer(make(), arm)
        trainer.step(rows)  # the optimiser's moments are made in the first
        began = time.process_time()
        trainer.step(rows)
        steps[share] = time.process_time() - began
    return {
        "rows": len(packed),
        "tokens_apart": tokens[False],
        "tokens_joined": tokens[True],
        "fewer_tokens": tokens[False] / tokens[True],
        "seconds_apart": median(seconds[False]),
        "seconds_joined": median(seconds[True]),
        "faster": median(seconds[False]) / median(seconds[True]),
        "step_apart": steps[False],
        "step_joined": steps[True],
        "faster_step": steps[False] / steps[True],
        "gradient_difference": (apart / norm) ** 0.5,
    }


def main() -> None:
    torch.set_num_threads(1)
    screen = console()
    found: dict[str, dict[str, Any]] = {}
    with screen.status("playing, then computing gradients …"):
        for name, file, more in (
            ("SmolLM2, lake in words", "smollm2_frozen_lake.yaml", []),
            ("demo's lake", "frozen_lake_train.yaml", [f"policy.model={ROOT / 'models' / 'frozen_lake'}"]),
        ):
            config = load(ROOT / "configs" / file, more)
            model = config.policy.model
            found[name] = compared(
                lambda model=model: load_model(model), training_of(config), played(config), ROUNDS
            )
        found["nothing shared"] = compared(
            lambda: tiny_llama(300, hidden_size=128, layers=4),
            TrainerSettings(device="cpu"),
            unshared(300),
            3 * ROUNDS,
        )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("batch", no_wrap=True)
    for title in (
        "rows",
        "tokens",
        "joined",
        "fewer",
        "CPU s",
        "joined",
        "faster",
        "step",
        "joined",
        "faster",
        "gradients apart",
    ):
        table.add_column(title, justify="right")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['rows']}",
            f"{row['tokens_apart']:,}",
            f"{row['tokens_joined']:,}",
            f"{row['fewer_tokens']:.1f}×",
            f"{row['seconds_apart']:.2f}",
            f"{row['seconds_joined']:.2f}",
            f"{row['faster']:.1f}×",
            f"{row['step_apart']:.2f}",
            f"{row['step_joined']:.2f}",
            f"{row['faster_step']:.1f}×",
            f"{row['gradient_difference']:.1e}",
        )
    screen.print(table)
    write_results("prefixes", {"batches": found})


if __name__ == "__main__":
    main()
