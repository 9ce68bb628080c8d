"""How much of the on-policy result is kept with batches of staleness 4? The demo with several losses, three seeds each.

    python bench/staleness.py [--steps N] [ARM] [SEED]

Every arm trains the demo's base model through the whole pipeline, with batches that are played up to four versions ahead, and
plays the same held-out lakes greedily now and then. One arm and seed takes minutes, and is measured by itself if it is named; the
figures of the others stay in `bench/results/staleness.json`. Without names, those that are missing are measured. The table has
the share of held-out lakes that are solved at the end, relative to the synchronous arm, and the age of the trained tokens.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.cli.console import console
from rollwright.config import load
from rollwright.run.folder import RunFolder
from rollwright.run.training import TrainingRun

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "frozen_lake_train.yaml"
STEPS, EVAL_STEPS, SEEDS = 80, 20, 3
STALENESS = 4
_AHEAD = [
    f"async_generation_ratio={STALENESS}",
    f"train_env_manager.num_env_groups={48 * (STALENESS + 1)}",
    f"max_inflight={384 * (STALENESS + 1)}",
]
ARMS: Mapping[str, list[str]] = {
    "on-policy": [],
    "clipped": _AHEAD,
    "proximal": [*_AHEAD, "training.loss={ratio: proximal}"],
    "masked": [*_AHEAD, "training.loss={ratio: proximal, correction: mask}"],
    "cispo": [*_AHEAD, "training.loss={name: cispo, clip_low: 1.0, clip_high: 4.0}"],
    "gspo": [*_AHEAD, "training.loss={name: gspo, aggregation: sequence_mean}"],
    "dppo_tv": [*_AHEAD, "training.loss={name: dppo_tv}"],
    "sapo": [*_AHEAD, "training.loss={name: sapo}"],
}
"""Settings beside the demo's."""


def measure(arm: str, seed: int, steps: int) -> dict[str, Any]:
    """The validations and ages of one run."""
    overrides = [
        f"policy.model={ROOT / 'models' / 'frozen_lake'}",
        "training.checkpoint_steps=1000",
        f"seed={seed}",
        f"max_steps={steps}",
        f"eval_steps={min(EVAL_STEPS, steps)}",
        *ARMS[arm],
    ]
    with tempfile.TemporaryDirectory() as place:
        folder, config = RunFolder.create(Path(place), load(CONFIG, overrides))
        run = TrainingRun(config, folder, store=folder.store_address(None))
        asyncio.run(run.run())
        tokens = sum(run.state.staleness.values())
        return {
            "validations": run.state.validations,
            "mean_age": sum(age * count for age, count in run.state.staleness.items()) / max(tokens, 1),
            "most_age": max(run.state.staleness, default=0),
            "skipped": dict(run.trainer.skipped),
        }


def key(arm: str, seed: int) -> str:
    return f"{arm} {seed}"


def read() -> dict[str, Any]:
    file = RESULTS / "staleness.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))["runs"]) if file.is_file() else {}


def table(runs: Mapping[str, Any]) -> Table:
    def solved(arm: str) -> list[float]:
        found = [runs[key(arm, seed)] for seed in range(SEEDS) if key(arm, seed) in runs]
        return [each["validations"][-1].get("success", 0.0) for each in found]

    reference = mean(solved("on-policy")) if solved("on-policy") else None
    shown = Table("arm", "seeds", "solved at the end", "of on-policy", "mean age", "oldest")
    for arm in ARMS:
        if not (ends := solved(arm)):
            continue
        own = [runs[key(arm, seed)] for seed in range(SEEDS) if key(arm, seed) in runs]
        shown.add_row(
            arm,
            f"{len(ends)}",
            f"{mean(ends):.1%}",
            f"{mean(ends) / reference:.1%}" if reference else "–",
            f"{mean(each['mean_age'] for each in own):.2f}",
            f"{max(each['most_age'] for each in own)}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", nargs="?", choices=list(ARMS))
    parser.add_argument("seed", nargs="?", type=int, choices=range(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    runs, screen = read(), console()
    arms = list(ARMS) if given.arm is None else [given.arm]
    seeds = range(SEEDS) if given.seed is None else [given.seed]
    for seed in seeds:  # arms in turn, so that a busy hour meets all of them
        for arm in arms:
            if key(arm, seed) in runs and given.seed is None:
                continue
            screen.print(f"{arm}, seed {seed}", highlight=False)
            runs[key(arm, seed)] = measure(arm, seed, given.steps)
            write_results("staleness", {"steps": given.steps, "staleness": STALENESS, "runs": runs})
    screen.print(table(runs))


if __name__ == "__main__":
    main()
