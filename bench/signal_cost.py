"""What does a measurement of the gradient's signal cost? CPU seconds of a trainer's step with it and without it.

    python bench/signal_cost.py

Three batches as in `prefixes.py`: the language model's lake (model fetched before), the demo's lake, and rows that share
nothing. Two trainers with the same weights take the same batch in turns with one thread, one of them measuring in every step;
the median of the quotients of a turn is what a measured step costs. A run measures one step in `training.signal_steps`, so
that part of it is the share of a run's training, which is left of the playing.
"""

import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # two threads on two busy cores wait for each other

import torch
from rich import box
from rich.table import Table

from prefixes import ROOT, played, unshared
from results_file import write_results
from rollwright.cli.console import console
from rollwright.config import load
from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama
from rollwright.run.build_training import training_of
from rollwright.training.rows import Row
from rollwright.training.settings import TrainerSettings
from rollwright.training.trainer import Trainer

HARDLY_LEARNS = 1e-9
"""Learning rate that leaves the weights where they are, so that every turn computes the same."""
MOST = 0.02
"""Of a run's CPU time for training: what measuring may cost."""


def cost(
    make: Callable[[], Any], settings: TrainerSettings, rows: Sequence[Row], rounds: int
) -> dict[str, Any]:
    arms = {
        measures: Trainer(
            make(),
            settings.model_copy(
                update={"learning_rate": HARDLY_LEARNS, "final_learning_rate": None, "signal_steps": every}
            ),
        )
        for measures, every in ((False, 0), (True, 1))
    }
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds + 1):
        for measures in (False, True) if turn % 2 else (True, False):
            began = time.process_time()
            report = arms[measures].step(rows)
            if turn:  # the optimiser's moments are made in the first
                seconds[measures].append(time.process_time() - began)
            assert (report.gradient_signal is not None) is measures, "the arms are what their names say"
    quotients = [found / plain for plain, found in zip(seconds[False], seconds[True], strict=True)]
    every = TrainerSettings(device="cpu").signal_steps
    return {
        "rows": len(rows),
        "plain_seconds": median(seconds[False]),
        "measured_seconds": median(seconds[True]),
        "of_a_step": median(quotients) - 1,
        "least": min(quotients) - 1,
        "most": max(quotients) - 1,
        "signal_steps": every,
        "of_a_run": (median(quotients) - 1) / every,
    }


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    found["nothing shared"] = cost(
        lambda: tiny_llama(300, hidden_size=128, layers=4),
        TrainerSettings(device="cpu", max_logprob_gap=100.0),  # no engine has played these rows
        unshared(300),
        15,
    )
    for name, file, more, rounds in (
        ("demo's lake", "frozen_lake_train.yaml", [f"policy.model={ROOT / 'models' / 'frozen_lake'}"], 15),
        ("SmolLM2, lake in words", "smollm2_frozen_lake.yaml", [], 3),
    ):
        config = load(ROOT / "configs" / file, more)
        model = config.policy.model
        found[name] = cost(lambda model=model: load_model(model), training_of(config), played(config), rounds)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("batch", no_wrap=True)
    for title in ("CPU s of a step", "measured", "more", "of a run's training"):
        table.add_column(title, justify="right")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['plain_seconds']:.3f}",
            f"{row['measured_seconds']:.3f}",
            f"{row['of_a_step']:+.1%} ({row['least']:+.1%} to {row['most']:+.1%})",
            f"{row['of_a_run']:+.2%}",
        )
    console().print(table)
    write_results("signal_cost", {"most": MOST, "batches": found})


if __name__ == "__main__":
    main()
