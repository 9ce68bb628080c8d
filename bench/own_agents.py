"""What does it cost to train an agent as it is? SmolLM2 learns to compare numbers, as a chat agent and through OpenAI's SDK.

    python bench/own_agents.py [ARM …] [--seeds N] [--steps N]

Both arms ask the same question with the same words, train on the same rows in the same order, and are validated greedily on
the same held-out rows. The SDK's calls go over HTTP through the worker's gateway, which records them. Noted are the sampled
tokens and CPU seconds (this process and its children, validation left out) until the held-out reward has risen by 30 points,
and the whole curve. Part of the gain is format: the base model seldom begins with a number. Needs
`rollwright model fetch smollm2`. With arms named, only these are measured again, and the others' figures stay.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.cli.console import console
from rollwright.config import RunConfig, load
from rollwright.rollout import Batch
from rollwright.run.folder import RunFolder
from rollwright.run.statistics import batch_row
from rollwright.run.training import TrainingRun

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "train_own_agent" / "train.yaml"
GAIN = 0.3
"""Rise of the held-out reward that a run is timed to."""
EVAL_STEPS = 4

ARMS: Mapping[str, list[str]] = {
    "sdk": [],
    "chat": [
        "custom_envs.Larger.agent=null",
        "custom_envs.Larger.agent_system_template='Be brief.'",
        "custom_envs.Larger.template='{question}'",
    ],
}
"""Settings beside the example's."""


@dataclass(frozen=True)
class Point:
    """The run when it was validated."""

    step: int
    tokens: int
    cpu_seconds: float
    reward: float


def cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class TimedRun(TrainingRun):
    """Notes a point at every validation."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self.points: list[Point] = []
        self._sampled = 0
        self._began, self._aside = cpu_seconds(), 0.0
        super().__init__(config, folder, store=folder.store_address(None), row=self._counted_row)

    def _counted_row(self, mode: str, step: int, seconds: float, batch: Batch) -> dict[str, Any]:
        if mode == "train":
            self._sampled += sum(each.sampled_tokens for each in batch.trajectories)
        return batch_row(mode, step, seconds, batch)

    async def _evaluate(self, done: int) -> None:
        before = cpu_seconds()
        await super()._evaluate(done)
        spent = before - self._began - self._aside
        self.points.append(Point(done, self._sampled, spent, self.state.validations[-1]["reward"]))
        self._aside += cpu_seconds() - before


def learn(arm: str, seed: int, steps: int) -> list[Point]:
    changes = [f"seed={seed}", f"max_steps={steps}", f"eval_steps={EVAL_STEPS}", *ARMS[arm]]
    with tempfile.TemporaryDirectory() as runs:
        folder, config = RunFolder.create(Path(runs), load(CONFIG, changes))
        run = TimedRun(config, folder)
        asyncio.run(run.run())
    return run.points


def first_enough(points: list[Point]) -> Point | None:
    return next((each for each in points if each.reward >= points[0].reward + GAIN), None)


def measured_before() -> dict[str, dict[str, list[Point]]]:
    file = RESULTS / "own_agents.json"
    if not file.is_file():
        return {}
    curves = json.loads(file.read_text(encoding="utf-8"))["curves"]
    return {
        arm: {seed: [Point(**each) for each in points] for seed, points in runs.items()}
        for arm, runs in curves.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="*", metavar="ARM", help=f"of {', '.join(ARMS)}; default: all")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=16)
    asked = parser.parse_args()
    if unknown := set(asked.arms) - set(ARMS):
        parser.error(f"unknown arm {min(unknown)}; known: {', '.join(ARMS)}")
    screen = console()
    curves = {arm: {} for arm in ARMS} | measured_before()
    for seed in asked.seeds:
        for arm in asked.arms or ARMS:
            began = time.monotonic()
            points = curves[arm][str(seed)] = learn(arm, seed, asked.steps)
            screen.print(
                f"{arm}, seed {seed}: {points[0].reward:.0%} → {points[-1].reward:.0%} after {points[-1].step} steps, "
                f"{points[-1].cpu_seconds:.0f} CPU s, {time.monotonic() - began:.0f} s"
            )
            report(curves)
    screen.print(shown([row(arm, runs) for arm, runs in curves.items() if runs]))


def report(curves: Mapping[str, Mapping[str, list[Point]]]) -> None:
    """Writes what there is, so that a run that is ended loses one curve at the most."""
    draw(curves, RESULTS / "own_agents.png")
    kept = {
        arm: {seed: [asdict(each) for each in points] for seed, points in runs.items()}
        for arm, runs in curves.items()
    }
    rows = [row(arm, runs) for arm, runs in curves.items() if runs]
    write_results("own_agents", {"gain": GAIN, "arms": rows, "curves": kept})


def row(arm: str, runs: Mapping[str, list[Point]]) -> dict[str, Any]:
    """Means over the seeds that rose by `GAIN`."""
    reached = [found for points in runs.values() if (found := first_enough(points)) is not None]
    last = [points[-1] for points in runs.values()]
    return {
        "arm": arm,
        "seeds": len(runs),
        "reached": len(reached),
        "steps": mean(each.step for each in reached) if reached else None,
        "tokens": mean(each.tokens for each in reached) if reached else None,
        "cpu_seconds": mean(each.cpu_seconds for each in reached) if reached else None,
        "cpu_per_step": sum(each.cpu_seconds for each in last) / sum(each.step for each in last),
        "before": mean(points[0].reward for points in runs.values()),
        "after": mean(each.reward for each in last),
        "most_cpu_seconds": max(each.cpu_seconds for each in last),
    }


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"to +{GAIN:.0%} held-out reward", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("arm", "reached", "steps", "tokens", "CPU s", "CPU s/step", "before", "after"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for each in rows:
        figures = [each[name] for name in ("steps", "tokens", "cpu_seconds", "cpu_per_step")]
        table.add_row(
            each["arm"],
            f"{each['reached']} of {each['seeds']}",
            *("–" if figure is None else f"{figure:,.1f}" for figure in figures),
            f"{each['before']:.0%}",
            f"{each['after']:.0%}",
        )
    return table


def draw(curves: Mapping[str, Mapping[str, list[Point]]], file: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, (arm, runs) in enumerate(curves.items()):
        for number, points in enumerate(runs.values()):
            rewards = [100 * each.reward for each in points]
            label = arm if number == 0 else None
            left.plot([each.tokens for each in points], rewards, color=f"C{place}", alpha=0.7, label=label)
            right.plot([each.cpu_seconds for each in points], rewards, color=f"C{place}", alpha=0.7)
    for axis, what in ((left, "sampled tokens"), (right, "CPU seconds, without validation")):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set(xlabel=what, ylim=(0, 102))
    left.set(ylabel="held-out reward, greedy, %")
    left.legend(frameon=False, loc="lower right")
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
