"""Does sharing rollouts help, and does checking them protect? SAPO in miniature, on a CPU.

    python bench/swarm.py [--seeds 8] [--rounds 40] [--workers 2] [--arms NAME …]

Eight nodes of `swarm_miniature` for each arm and seed: with I own and J foreign groups in a round (I/J), with a node that
poisons and is believed, with one that poisons and is checked, and with one that shares nothing in its place. All arms of a seed have the same base model, keys and
tasks. The figure is the cumulative reward: the mean reward of the nodes' own rollouts, summed over the rounds; the node
that poisons, or would, is left out of it in every arm. Intervals are Student's, over the seeds, at 95 %.

With `--arms` only these are run again; the others' figures, of as many seeds and rounds, stay.

Leaves `bench/results/swarm.json` and the picture `bench/results/swarm.png`.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the workers share the cores

from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.cli.console import console
from swarm_miniature import Arm, Outcome, base_model, run

ALONE, SAME_GENERATION, SHARED = "8/0", "4/0", "4/4"
TRUSTED, CHECKED, WITHOUT = "4/4, poison believed", "4/4, poison checked", "4/4, one silent"
ARMS = (
    Arm(ALONE, 8, 0),
    Arm(SAME_GENERATION, 4, 0),
    Arm("6/2", 6, 2),
    Arm(SHARED, 4, 4),
    Arm("2/6", 2, 6),
    Arm(TRUSTED, 4, 4, poisoned=True, verified=False),
    Arm(CHECKED, 4, 4, poisoned=True),
    Arm(WITHOUT, 4, 4, silent=True),
)
LEAST_GAIN = 1.15
"""Of 4/4 over 4/0, which generates as much."""
MOST_LOSS = 0.03
"""What a poisoner that is checked may change, either way, against the same swarm without what it sends."""
PAPER_GAIN = 0.94
"""Of 4/4 over 8/0, as the authors of SAPO publish it for Qwen2.5-0.5B over 2,000 rounds."""
STUDENT = {3: 4.303, 4: 3.182, 6: 2.571, 8: 2.365, 10: 2.262, 12: 2.201, 16: 2.131, 20: 2.093, 24: 2.069}
"""Quantiles at 97.5 %, by the number of seeds."""
BASE_SEED = 0

_base: Any = None
"""What all nodes begin with; made once in each worker."""


def work(arm: Arm, seed: int, rounds: int) -> tuple[Outcome, float]:
    """One run, and the CPU seconds that it took."""
    global _base
    if _base is None:
        _base = base_model(BASE_SEED)
    began = time.process_time()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # numbers are flushed to disk one by one
    with tempfile.TemporaryDirectory(dir=memory) as home:
        outcome = asyncio.run(run(arm, seed, _base, rounds, Path(home)))
    return outcome, time.process_time() - began


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and the ends of its interval."""
    mean = statistics.fmean(values)
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def compared(totals: Mapping[str, Sequence[float]], arm: str, base: str) -> dict[str, Any]:
    """How much more reward an arm brings than another, on the same seeds; 0.1 is a tenth more."""
    gains = [one / other - 1 for one, other in zip(totals[arm], totals[base], strict=True)]
    mean, low, high = interval(gains)
    return {"arm": arm, "base": base, "gain": mean, "low": low, "high": high, "by_seed": gains}


def on_file(seeds: int, rounds: int, names: Collection[str]) -> tuple[list[dict[str, Any]], float]:
    """The figures of arms that are not run again, and the CPU seconds that all on file took."""
    if not names:
        return [], 0.0
    figures = json.loads((RESULTS / "swarm.json").read_text(encoding="utf-8"))
    if (figures["seeds"], figures["rounds"]) != (seeds, rounds):
        sys.exit(
            f"swarm.json has {figures['seeds']} seeds and {figures['rounds']} rounds: run all arms again"
        )
    return [each for each in figures["arms"] if each["name"] in names], figures["cpu_seconds"]


def figures_of(arm: Arm, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    totals = [sum(each.rewards) for each in outcomes]
    mean, low, high = interval(totals)
    refused: Counter[str] = Counter()
    for each in outcomes:
        refused.update(each.refused)
    return {
        **asdict(arm),
        "cumulative": mean,
        "low": low,
        "high": high,
        "by_seed": totals,
        "accuracy": statistics.fmean(each.accuracy for each in outcomes),
        "foreign_groups": statistics.fmean(each.foreign for each in outcomes),
        "refused": dict(refused),
        "caught_by": statistics.fmean(each.quarantined for each in outcomes),
        "curve": [statistics.fmean(each) for each in zip(*(run.rewards for run in outcomes), strict=True)],
    }


def draw(arms: Sequence[dict[str, Any]], comparisons: Sequence[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for each in arms:
        smooth = [
            statistics.fmean(each["curve"][max(0, at - 4) : at + 1]) for at in range(len(each["curve"]))
        ]
        left.plot(smooth, label=each["name"], linestyle="--" if each["poisoned"] else "-")
    left.set(xlabel="round", ylabel="mean reward of own rollouts (mean of the last 5)")
    left.legend(fontsize=8)
    for place, each in enumerate(reversed(comparisons)):
        right.plot([100 * each["low"], 100 * each["high"]], [place, place], color="tab:blue")
        right.plot(100 * each["gain"], place, "o", color="tab:blue")
    right.axvline(0, color="grey", linewidth=0.8)
    right.set_yticks(
        range(len(comparisons)),
        [f"{each['arm']}\nagainst {each['base']}" for each in reversed(comparisons)],
        fontsize=8,
    )
    right.set(xlabel="more cumulative reward, % (95 % over the seeds)")
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, choices=sorted(STUDENT))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS])
    asked = parser.parse_args()
    screen = console()
    done: dict[tuple[str, int], Outcome] = {}
    wanted = [arm for arm in ARMS if not asked.arms or arm.name in asked.arms]
    kept_arms, spent = on_file(asked.seeds, asked.rounds, [arm.name for arm in ARMS if arm not in wanted])
    with ProcessPoolExecutor(asked.workers) as pool:
        jobs = {
            pool.submit(work, arm, seed, asked.rounds): (arm, seed)
            for seed in range(asked.seeds)
            for arm in wanted
        }
        for job in as_completed(jobs):
            arm, seed = jobs[job]
            done[arm.name, seed], seconds = job.result()
            spent += seconds
            total = sum(done[arm.name, seed].rewards)
            screen.print(
                f"{len(done)}/{len(jobs)}  seed {seed}  {arm.name:22} {total:6.2f}  {seconds:.0f} CPU s"
            )
    found = {each["name"]: each for each in kept_arms}
    for arm in wanted:
        found[arm.name] = figures_of(arm, [done[arm.name, seed] for seed in range(asked.seeds)])
    arms = [found[arm.name] for arm in ARMS]
    totals = {each["name"]: each["by_seed"] for each in arms}
    comparisons = [
        compared(totals, *pair)
        for pair in (
            (SHARED, SAME_GENERATION),
            ("6/2", ALONE),
            (SHARED, ALONE),
            ("2/6", ALONE),
            (TRUSTED, SAME_GENERATION),
            (TRUSTED, SHARED),
            (CHECKED, SHARED),
            (CHECKED, WITHOUT),
        )
    ]
    by_pair = {(each["arm"], each["base"]): each for each in comparisons}
    gain, checked = by_pair[SHARED, SAME_GENERATION], by_pair[CHECKED, WITHOUT]
    kept = {
        "gain": 1 + gain["gain"] >= LEAST_GAIN,
        "protected": checked["low"] <= 0 <= checked["high"]
        and checked["low"] >= -MOST_LOSS
        and checked["high"] <= MOST_LOSS,
    }
    figures = {
        "seeds": asked.seeds,
        "rounds": asked.rounds,
        "cpu_seconds": spent,
        "arms": arms,
        "comparisons": comparisons,
        "targets": {"least_gain": LEAST_GAIN, "most_loss": MOST_LOSS, "kept": kept, "paper_gain": PAPER_GAIN},
    }
    draw(arms, comparisons, RESULTS / "swarm.png")
    file = write_results("swarm", figures)
    table = Table(title="cumulative reward", title_justify="left")
    for head in ("arm", "reward", "95 %", "greedy accuracy", "foreign groups"):
        table.add_column(head)
    for each in arms:
        ends = f"{each['low']:.2f} … {each['high']:.2f}"
        table.add_row(
            each["name"],
            f"{each['cumulative']:.2f}",
            ends,
            f"{each['accuracy']:.3f}",
            f"{each['foreign_groups']:.0f}",
        )
    screen.print(table)
    for each in comparisons:
        screen.print(
            f"{each['arm']} against {each['base']}: {100 * each['gain']:+.1f} % "
            f"({100 * each['low']:+.1f} … {100 * each['high']:+.1f})"
        )
    screen.print(f"{file}; {spent / 60:.0f} CPU minutes; kept: {kept}", soft_wrap=True)
    return not all(kept.values())


if __name__ == "__main__":
    raise SystemExit(main())
