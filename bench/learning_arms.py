"""Which way of playing and comparing learns with the fewest tokens? Chains and trees, synchronous and asynchronous, by seed.

    python bench/learning_arms.py [TASK/ARM/MODE …] [--seeds N] [--again]

Two tasks on the demo's lakes and base model: `lakes`, of which it crosses half, and `detours`, on which no straight way leads
to the goal, so that success is rare and a mistake ends the episode. Each cell (task, arm, mode, seed) is one training,
validated greedily every few steps on lakes held out by structure. Noted are the sampled tokens and CPU seconds, validation
left out, until the goal is reached for the first time. A finished cell is on file at once and is not run again unless
`--again` says so, so the table can be completed in parts; cells that are missing are named. Intervals are over seeds; a
seed that did not reach the goal counts with all that it spent, and the figure is marked as a lower bound.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from learning import ROOT, Point, TimedRun
from results_file import RESULTS, write_results
from rollwright.cli.console import console
from rollwright.config import load
from rollwright.evaluation.intervals import closed_form
from rollwright.run.folder import RunFolder

CONFIG = ROOT / "configs" / "frozen_lake_train.yaml"
BASE = (
    f"policy.model={ROOT / 'models' / 'frozen_lake'}",
    "training.checkpoint_steps=1000",
    "val_env_manager.num_env_groups=128",
)
TASKS: Mapping[str, Sequence[str]] = {
    "lakes": ("val_env_manager.tags=[HeldOutLake]",),
    "detours": ("custom_envs.Lake.env_config.needs_detour=true", "val_env_manager.tags=[HeldOutDetour]"),
}
GOALS = {"lakes": 0.8, "detours": 0.5}
"""Share of held-out lakes that a run is timed to."""
ARMS: Mapping[str, Sequence[str]] = {
    "grpo": ("training.advantage=grpo",),
    "rloo": ("training.advantage=rloo",),
    "rloo_4": (
        "train_env_manager.group_size=4",
        "rollout_batch_size=192",
        "training.advantage=rloo",
    ),
    "gigpo": ("training.advantage={name: gigpo, options: {std: true}}",),
    "tree": (
        "strategy={kind: tree, width: 4, depth: 6, branch: {kind: keep_alive, alive: 8}}",
        "train_env_manager.group_size=2",
        "rollout_batch_size=96",
        "training.advantage={name: tree, options: {kappa: 2}}",
    ),
    "small_tree": (
        "strategy={kind: tree, width: 2, depth: 6, branch: {kind: keep_alive, alive: 4}}",
        "train_env_manager.group_size=2",
        "rollout_batch_size=96",
        "training.advantage={name: tree, options: {kappa: 2}}",
    ),
}
"""Settings beside the demo's: groups of eight chains, or of four; two trees that keep eight branches alive, or four, with the
shrunk baseline. The small tree was chosen after seed 0 of `detours` had shown what the large one costs."""
MODES: Mapping[str, Sequence[str]] = {
    "sync": (),
    "async": ("async_generation_ratio=1", "train_env_manager.num_env_groups=96", "max_inflight=768"),
}
"""The asynchronous mode has room for the batch that is waited for and the one ahead."""
STEPS, EVAL_STEPS = 40, 4
SEEDS = 5

Cells = dict[str, list[Point]]
"""Curves by `task/arm/mode/seed`."""


def all_cells(seeds: int) -> list[str]:
    """Seed by seed, so that a part of the table compares all arms."""
    return [
        f"{task}/{arm}/{mode}/{seed}"
        for seed in range(seeds)
        for task in TASKS
        for mode in MODES
        for arm in ARMS
    ]


def learn(cell: str, steps: int) -> list[Point]:
    task, arm, mode, seed = cell.split("/")
    changes = [
        f"seed={seed}",
        f"max_steps={steps}",
        f"eval_steps={EVAL_STEPS}",
        *BASE,
        *TASKS[task],
        *ARMS[arm],
        *MODES[mode],
    ]
    with tempfile.TemporaryDirectory() as runs:
        folder, config = RunFolder.create(Path(runs), load(CONFIG, changes))
        run = TimedRun(config, folder)
        asyncio.run(run.run())
    return run.points


def on_file() -> Cells:
    file = RESULTS / "learning_arms.json"
    if not file.is_file():
        return {}
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return {cell: [Point(**each) for each in points] for cell, points in cells.items()}


def row(task: str, arm: str, mode: str, cells: Cells) -> dict[str, Any]:
    """Means over the seeds that are there, with 95 % intervals where there are two or more."""
    runs = [points for cell, points in cells.items() if cell.rpartition("/")[0] == f"{task}/{arm}/{mode}"]
    reached = [next((each for each in points if each.solved >= GOALS[task]), None) for points in runs]
    spent = [found or points[-1] for found, points in zip(reached, runs, strict=True)]
    return {
        "task": task,
        "arm": arm,
        "mode": mode,
        "seeds": len(runs),
        "reached": sum(each is not None for each in reached),
        "tokens": _estimate([each.tokens for each in spent]),
        "cpu_seconds": _estimate([each.cpu_seconds for each in spent]),
        "base": _estimate([points[0].solved for points in runs]),
        "final": _estimate([points[-1].solved for points in runs]),
    }


def _estimate(values: Sequence[float]) -> dict[str, float | None] | None:
    if not values:
        return None
    found = closed_form(values, share=False) if len(values) > 1 else None
    low, high = (None, None) if found is None else (found.low, found.high)
    return {"mean": sum(values) / len(values), "low": low, "high": high}


def write(cells: Cells, seeds: int) -> list[dict[str, Any]]:
    rows = [
        found
        for task in TASKS
        for mode in MODES
        for arm in ARMS
        if (found := row(task, arm, mode, cells))["seeds"]
    ]
    kept = {cell: [asdict(each) for each in points] for cell, points in sorted(cells.items())}
    missing = [cell for cell in all_cells(seeds) if cell not in cells]
    write_results(
        "learning_arms",
        {"goals": GOALS, "steps": STEPS, "rows": rows, "missing": missing, "cells": kept},
    )
    return rows


def shown(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="to the goal, mean over seeds", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("task", "mode", "arm", "seeds", "reached", "tokens", "CPU s", "at the end"):
        table.add_column(name, justify="left" if name in ("task", "mode", "arm") else "right")
    for each in rows:
        mark = "" if each["reached"] == each["seeds"] else "> "
        table.add_row(
            each["task"],
            each["mode"],
            each["arm"],
            str(each["seeds"]),
            str(each["reached"]),
            f"{mark}{each['tokens']['mean']:,.0f}",
            f"{mark}{each['cpu_seconds']['mean']:,.0f}",
            f"{each['final']['mean']:.0%}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", metavar="CELL", help="beginning of cells to run; default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--again", action="store_true", help="run cells that are on file, too")
    asked = parser.parse_args()
    wanted = [
        cell for cell in all_cells(asked.seeds) if not asked.cells or cell.startswith(tuple(asked.cells))
    ]
    if not wanted:
        sys.exit(f"no cell begins so; cells are TASK/ARM/MODE/SEED, for example {all_cells(1)[0]}")
    screen, cells = console(), on_file()
    for cell in wanted:
        if cell in cells and not asked.again:
            continue
        cells[cell] = learn(cell, asked.steps)
        end = cells[cell][-1]
        screen.print(f"{cell}: {end.solved:.0%} after {end.step} steps, {end.tokens:,} tokens")
        write(cells, asked.seeds)
    screen.print(shown(write(cells, asked.seeds)))


if __name__ == "__main__":
    main()
