"""How fast does a model learn? The demo's training with GiGPO, synchronous, asynchronous and with trees, three seeds each.

    python bench/learning.py [ARM …]

Every arm trains the demo's base model through the whole pipeline and plays the same held-out lakes greedily every few
steps. Noted are the steps, sampled tokens, CPU seconds and seconds of the run until 80 % of them are solved for the first
time, validation's own time left out, and where the run ends. CPU seconds are the figure to compare: the clock of a busy
machine says little. With arms named, only these are measured again, and the others' figures stay.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
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
from rollwright.run.folder import RunFolder
from rollwright.run.statistics import batch_row
from rollwright.run.training import TrainingRun

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "frozen_lake_train.yaml"
BASE = [
    f"policy.model={ROOT / 'models' / 'frozen_lake'}",
    "training.checkpoint_steps=1000",
    "training.advantage={name: gigpo, options: {std: true}}",  # each move beside the others made in the same state
]
STEPS = {"synchronous": 40, "asynchronous": 40, "tree": 100}
"""About the same number of sampled tokens: a tree's leaves share their first turns."""
EVAL_STEPS = 5
SEEDS = 3
ENOUGH = 0.8
"""Share of held-out lakes that a run is timed to."""

ARMS: Mapping[str, list[str]] = {
    "synchronous": [],
    "asynchronous": ["async_generation_ratio=1", "train_env_manager.num_env_groups=96", "max_inflight=768"],
    "tree": [
        "strategy={kind: tree, width: 2, depth: 3, branch: fixed}",
        "train_env_manager.group_size=1",
        "rollout_batch_size=48",
        "training.advantage={name: tree, options: {kappa: 2}}",
    ],
}
"""Settings beside the demo's. The asynchronous arm has room for the batch that is waited for and the one ahead; a tree of
eight leaves stands for a group of eight."""


@dataclass(frozen=True)
class Point:
    """The run when it was validated."""

    step: int
    tokens: int
    cpu_seconds: float
    seconds: float
    solved: float


@dataclass
class Clock:
    """Time spent on anything but validation."""

    began: tuple[float, float] = field(default_factory=lambda: (time.process_time(), time.monotonic()))
    validating: tuple[float, float] = (0.0, 0.0)

    def spent(self) -> tuple[float, float]:
        now = time.process_time(), time.monotonic()
        cpu, wall = (
            end - start - aside for end, start, aside in zip(now, self.began, self.validating, strict=True)
        )
        return cpu, wall


class TimedRun(TrainingRun):
    """Notes a point at every validation."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self.points: list[Point] = []
        self._sampled = 0
        self._clock = Clock()
        super().__init__(config, folder, store=folder.store_address(None), row=self._counted_row)

    def _counted_row(self, mode: str, step: int, seconds: float, batch: Batch) -> dict[str, Any]:
        if mode == "train":
            self._sampled += sum(each.sampled_tokens for each in batch.trajectories)
        return batch_row(mode, step, seconds, batch)

    async def _evaluate(self, done: int) -> None:
        cpu, wall = self._clock.spent()
        await super()._evaluate(done)
        self.points.append(Point(done, self._sampled, cpu, wall, self.state.validations[-1]["success"]))
        now = self._clock.spent()
        before = self._clock.validating
        self._clock.validating = before[0] + now[0] - cpu, before[1] + now[1] - wall


def learn(arm: str, seed: int) -> list[Point]:
    changes = [f"seed={seed}", f"max_steps={STEPS[arm]}", f"eval_steps={EVAL_STEPS}", *BASE, *ARMS[arm]]
    with tempfile.TemporaryDirectory() as runs:
        folder, config = RunFolder.create(Path(runs), load(CONFIG, changes))
        run = TimedRun(config, folder)
        asyncio.run(run.run())
    return run.points


def first_enough(points: list[Point]) -> Point | None:
    return next((each for each in points if each.solved >= ENOUGH), None)


def measured_before(left_out: Collection[str]) -> dict[str, list[list[Point]]]:
    """The curves of the other arms, as they are on file."""
    file = RESULTS / "learning.json"
    if not left_out:
        return {}
    curves = json.loads(file.read_text(encoding="utf-8"))["curves"]
    return {arm: [[Point(**point) for point in run] for run in curves[arm]] for arm in left_out}


def main() -> None:
    asked = sys.argv[1:] or list(ARMS)
    if unknown := set(asked) - set(ARMS):
        sys.exit(f"unknown arm {min(unknown)}; known: {', '.join(ARMS)}")
    screen = console()
    curves = measured_before([arm for arm in ARMS if arm not in asked]) | {arm: [] for arm in asked}
    for seed in range(SEEDS):
        for arm in asked:
            curves[arm].append(learn(arm, seed))
            end = curves[arm][-1][-1]
            screen.print(
                f"{arm}, seed {seed}: {end.solved:.1%} after {end.step} steps, {end.cpu_seconds:.0f} CPU s"
            )
    curves = {arm: curves[arm] for arm in ARMS}
    rows = [row(arm, runs) for arm, runs in curves.items()]
    screen.print(shown(rows))
    draw(curves, RESULTS / "learning.png")
    points = {arm: [[asdict(each) for each in run] for run in runs] for arm, runs in curves.items()}
    write_results("learning", {"enough": ENOUGH, "seeds": SEEDS, "arms": rows, "curves": points})


def row(arm: str, runs: list[list[Point]]) -> dict[str, Any]:
    """Means over the seeds; what not every seed reached is `None`."""
    firsts = [first_enough(points) for points in runs]
    reached = [each for each in firsts if each is not None]
    whole = len(reached) == len(runs)
    last = [points[-1].solved for points in runs]
    return {
        "arm": arm,
        "reached": len(reached),
        "steps": mean(each.step for each in reached) if whole else None,
        "tokens": mean(each.tokens for each in reached) if whole else None,
        "cpu_seconds": mean(each.cpu_seconds for each in reached) if whole else None,
        "seconds": mean(each.seconds for each in reached) if whole else None,
        "final": mean(last),
        "final_error": stdev(last) / len(last) ** 0.5 if len(last) > 1 else None,
    }


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"to {ENOUGH:.0%} of held-out lakes", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("arm", "steps", "tokens", "CPU s", "s", "at the end"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for each in rows:
        figures = [each[name] for name in ("steps", "tokens", "cpu_seconds", "seconds")]
        error = "" if each["final_error"] is None else f" ± {100 * each['final_error']:.1f}"
        table.add_row(
            each["arm"],
            *("–" if figure is None else f"{figure:,.0f}" for figure in figures),
            f"{100 * each['final']:.1f}{error} %",
        )
    return table


def draw(curves: Mapping[str, list[list[Point]]], file: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, (arm, runs) in enumerate(curves.items()):
        for number, points in enumerate(runs):
            solved = [100 * each.solved for each in points]
            label = arm if number == 0 else None
            left.plot(
                [each.tokens / 1000 for each in points], solved, color=f"C{place}", alpha=0.7, label=label
            )
            right.plot([each.cpu_seconds for each in points], solved, color=f"C{place}", alpha=0.7)
    for axis, what in ((left, "sampled tokens, thousands"), (right, "CPU seconds, without validation")):
        axis.axhline(100 * ENOUGH, color="gray", linestyle=":", linewidth=1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set(xlabel=what, ylim=(0, 102))
    left.set(ylabel="held-out lakes solved greedily, %")
    left.legend(frameon=False, loc="lower right")
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
