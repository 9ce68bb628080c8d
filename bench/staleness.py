"""How much of the on-policy result is kept with batches of staleness 4? The demo with several losses, three seeds each.

    python bench/staleness.py                  # what is missing: the candidates' runs first, then the compared ones
    python bench/staleness.py ARM [SEED]       # this one again

Every arm trains the demo's base model through the whole pipeline. In arms other than `on-policy` a batch waits in line until
four later ones have been played, so that from the fifth step on every token is exactly four versions old when it is trained on,
however busy the machine is; the ages are counted and shown. With `async_generation_ratio: 4` alone they would be four at most.
Candidates are compared by one run each with a seed of its own, on training lakes only; the best of them, plain clipping and
`on-policy` then run with three seeds, and play held-out lakes at the end.

A run that is killed is begun again; what has ended stays in `bench/results/staleness.json`. Several processes may share the
work if each is given its own arms.
"""

import argparse
import asyncio
import fcntl
import json
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.cli.console import console
from rollwright.config import RunConfig, load
from rollwright.rollout import Batch
from rollwright.rollout.settings import TrainEnvManagerConfig
from rollwright.run.folder import RunFolder
from rollwright.run.run import Run
from rollwright.run.training import MODEL, TrainingRun
from rollwright.run.training_record import FIGURES

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "frozen_lake_train.yaml"
STALENESS = 4
STEPS, EVAL_STEPS = 80, 20
"""The demo has 150 steps; its learning rate falls over these instead, in every arm."""
SEEDS = (0, 1, 2)
SELECTION_SEED, SELECTION_STEPS = 99, 40
"""Of the candidates' runs, which no result contains."""
LAST = 10
"""Steps over which the end of a training curve is averaged: 3,840 sampled episodes on fresh training lakes."""
LEVELS = 1024
"""Held-out lakes of sampled play at the end: a standard error below 1 point."""
MOST = 0.8
"""Share of training lakes that runs are timed to, in steps."""

ON_POLICY, PLAIN = "on-policy", "clipped"
LOSSES: Mapping[str, str] = {
    PLAIN: "{name: clipped}",
    "truncated": "{ratio: proximal, correction: truncate, truncation: 2.0}",
    "icepop": "{ratio: proximal, correction: mask, truncation_low: 0.5, truncation: 5.0}",
    "cispo": "{name: cispo, clip_low: 1.0, clip_high: 4.0}",
    "gspo": "{name: gspo, aggregation: sequence_mean}",
    "dppo_tv": "{name: dppo_tv}",
}
"""Arms with stale batches, as `training.loss`; the limits are those of the papers or the defaults."""
CANDIDATES = tuple(each for each in LOSSES if each != PLAIN)
CHOSEN = 2
"""Candidates that run with every seed, beside plain clipping."""


class Line:
    """Hands a batch out when `ahead` later ones have been played."""

    def __init__(self, ahead: int, steps: int) -> None:
        self._ahead = ahead
        self._steps = steps
        self._waiting: deque[Batch] = deque()

    async def next_batch(self, step: int, play: Callable[[], Awaitable[Batch]]) -> Batch:
        wanted = min(self._ahead + 1, self._steps - step)
        while len(self._waiting) < wanted:
            self._waiting.append(await play())
        return self._waiting.popleft()


def measure(arm: str, seed: int) -> dict[str, Any]:
    """Curves, ages and results of one run."""
    selecting = seed == SELECTION_SEED
    steps = SELECTION_STEPS if selecting else STEPS
    changes = [
        f"policy.model={ROOT / 'models' / 'frozen_lake'}",
        "training.checkpoint_steps=1000",
        f"seed={seed}",
        f"max_steps={steps}",
        f"eval_steps={EVAL_STEPS}",
        *([] if arm == ON_POLICY else [f"training.loss={LOSSES[arm]}"]),
        *(["val_env_manager=null"] if selecting else []),
    ]
    began = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        folder, config = RunFolder.create(Path(place), load(CONFIG, changes))
        run = TrainingRun(config, folder, store=folder.store_address(None))
        asyncio.run(run.run(Line(0 if arm == ON_POLICY else STALENESS, steps)))
        lines = [
            json.loads(each) for each in (folder.path / FIGURES / "metrics.jsonl").read_text().splitlines()
        ]
        sampled = None if selecting else asyncio.run(play_held_out(config, folder.path / MODEL))
    return {
        "steps": steps,
        "training": [each["success"] for each in lines if "loss" in each],
        "clip_share": [each["clip_share"] for each in lines if "loss" in each],
        "ages": {str(age): count for age, count in sorted(run.state.staleness.items())},
        "greedy": run.state.validations,
        "sampled": sampled,
        "skipped": {str(reason): count for reason, count in run.trainer.skipped.items()},
        "cpu_seconds": time.process_time() - began,
    }


async def play_held_out(config: RunConfig, model: Path) -> float:
    """The share of held-out lakes that are crossed with the sampling of training."""
    assert config.val_env_manager is not None
    play = TrainEnvManagerConfig(num_env_groups=LEVELS, tags=config.val_env_manager.tags)
    changes = {
        "train_env_manager": play,
        "rollout_batch_size": LEVELS,
        "async_generation_ratio": 0,
        "training": None,
        "policy": config.policy.model_copy(update={"model": str(model)}),
    }
    async with Run(config.model_copy(update=changes)) as run:
        batch = await run.get_batch()
    return mean(float(each.success or 0) for each in batch.trajectories)


def key(arm: str, seed: int) -> str:
    return f"{arm}, seed {seed}"


def read() -> dict[str, Any]:
    file = RESULTS / "staleness.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))["runs"]) if file.is_file() else {}


def add(found: Mapping[str, Any]) -> dict[str, Any]:
    """Adds runs to the file and returns all of them. Other processes may do the same meanwhile."""
    with (Path(tempfile.gettempdir()) / "rollwright-bench-staleness.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = {**read(), **found}
        write_results(
            "staleness",
            {
                "staleness": STALENESS,
                "last": LAST,
                "most": MOST,
                "levels": LEVELS,
                **summary(runs),
                "runs": runs,
            },
        )
    return runs


def at_the_end(run: Mapping[str, Any]) -> float:
    """The share of training lakes that were crossed in the last steps."""
    return mean(run["training"][-LAST:])


def steps_to_most(run: Mapping[str, Any]) -> int | None:
    """The first step at which `MOST` of the training lakes of the last steps were crossed; `None`: never."""
    curve = smooth(run["training"])
    return next((step for step, share in enumerate(curve, start=1) if step >= LAST and share >= MOST), None)


def mean_age(run: Mapping[str, Any]) -> float:
    ages = {int(age): count for age, count in run["ages"].items()}
    return sum(age * count for age, count in ages.items()) / max(sum(ages.values()), 1)


def choose(runs: Mapping[str, Any]) -> list[str] | None:
    """The best candidates on training lakes; `None` before all have run."""
    found = {arm: runs.get(key(arm, SELECTION_SEED)) for arm in CANDIDATES}
    if any(run is None for run in found.values()):
        return None
    return sorted(CANDIDATES, key=lambda arm: -at_the_end(found[arm] or {}))[:CHOSEN]


def summary(runs: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of the candidates and of the compared arms, as the page shows them."""
    selection = [
        {"arm": arm, "training": at_the_end(run), "mean_age": mean_age(run)}
        for arm in LOSSES
        if (run := runs.get(key(arm, SELECTION_SEED)))
    ]
    rows = []
    for arm in (ON_POLICY, PLAIN, *CANDIDATES):
        own = [runs[key(arm, seed)] for seed in SEEDS if key(arm, seed) in runs]
        if own:
            sampled = [each["sampled"] for each in own]
            rows.append(
                {
                    "arm": arm,
                    "seeds": len(own),
                    "steps": own[0]["steps"],
                    "sampled": mean(sampled),
                    "sampled_error": stdev(sampled) / len(sampled) ** 0.5 if len(sampled) > 1 else None,
                    "greedy": mean(each["greedy"][-1]["success"] for each in own),
                    "training": mean(at_the_end(each) for each in own),
                    "steps_to_most": [steps_to_most(each) for each in own],
                    "mean_age": mean(mean_age(each) for each in own),
                    "oldest": max(int(age) for each in own for age in each["ages"]),
                    "clip_share": mean(mean(each["clip_share"]) for each in own),
                    "cpu_seconds": mean(each["cpu_seconds"] for each in own),
                }
            )
    if rows and rows[0]["arm"] == ON_POLICY:
        for row in rows:
            for what in ("sampled", "greedy"):
                row[f"{what}_kept"] = row[what] / rows[0][what]
    return {"selection": selection, "arms": rows}


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table(title="held-out lakes crossed", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("arm", "seeds", "sampled", "of on-policy", "greedy", "of on-policy", "mean age", "oldest"):
        shown.add_column(name, justify="left" if name == "arm" else "right")
    for row in rows:
        kept = [f"{row[each]:.1%}" if each in row else "–" for each in ("sampled_kept", "greedy_kept")]
        shown.add_row(
            row["arm"],
            str(row["seeds"]),
            f"{row['sampled']:.1%}",
            kept[0],
            f"{row['greedy']:.1%}",
            kept[1],
            f"{row['mean_age']:.2f}",
            str(row["oldest"]),
        )
    return shown


def draw(runs: Mapping[str, Any], arms: Sequence[str], file: Path) -> None:
    """The mean curve of each arm, and every seed's behind it."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, arm in enumerate(arms):
        own = [runs[key(arm, seed)] for seed in SEEDS if key(arm, seed) in runs]
        colour = f"C{place}"
        training = [smooth([100 * each for each in run["training"]]) for run in own]
        greedy = [[100 * each["success"] for each in run["greedy"]] for run in own]
        for axis, curves, steps in (
            (left, training, list(range(1, len(training[0]) + 1))),
            (right, greedy, [each["step"] for each in own[0]["greedy"]]),
        ):
            for curve in curves:
                axis.plot(steps, curve, color=colour, alpha=0.25, linewidth=1)
            axis.plot(steps, [mean(each) for each in zip(*curves, strict=True)], color=colour, label=arm)
    for axis, what in (
        (left, f"training lakes crossed, sampled, mean of {LAST} steps, %"),
        (right, "held-out lakes crossed, greedy, %"),
    ):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set(xlabel="step", ylabel=what, ylim=(30, 100))
    left.legend(frameon=False, loc="lower right")
    figure.savefig(file, dpi=130)


def smooth(values: Sequence[float]) -> list[float]:
    return [mean(values[max(0, place - LAST + 1) : place + 1]) for place in range(len(values))]


def missing(runs: Mapping[str, Any]) -> tuple[str, int] | None:
    """The next arm and seed to run; `None` if all have."""
    wanted = [(arm, SELECTION_SEED) for arm in CANDIDATES]
    if (chosen := choose(runs)) is not None:  # seeds outside, so that a busy hour meets every arm
        wanted += [(arm, seed) for seed in SEEDS for arm in (ON_POLICY, PLAIN, *chosen)]
    return next((each for each in wanted if key(*each) not in runs), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", nargs="?", choices=[ON_POLICY, *LOSSES])
    parser.add_argument("seed", nargs="?", type=int, choices=[*SEEDS, SELECTION_SEED])
    given = parser.parse_args()
    runs, screen = read(), console()
    if given.arm is not None:
        for seed in SEEDS if given.seed is None else (given.seed,):
            screen.print(key(given.arm, seed), highlight=False)
            runs = add({key(given.arm, seed): measure(given.arm, seed)})
    while given.arm is None and (following := missing(runs)) is not None:
        screen.print(key(*following), highlight=False)
        runs = add({key(*following): measure(*following)})
    if rows := summary(add({}))["arms"]:
        screen.print(table(rows))
        draw(runs, [row["arm"] for row in rows], RESULTS / "staleness.png")


if __name__ == "__main__":
    main()
