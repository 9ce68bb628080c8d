"""Is the verdict on learning right? Trainings whose truth is known, because they were made that way, and what it says of them.

    python bench/learning_verdicts.py [CASE …] [--seeds N] [--again]

Short trainings of the demo's model on its lakes (16 groups of 8 for each step unless a case says otherwise, no validation):
some as they should be, others with one thing wrong. Each is judged after every step from the tenth on, with the verdict as it
stands now; the figures that it rests on are kept, so thresholds can be tried without training again
(`tests/observe/test_verdict_calibration.py`). `right`: the findings that the construction makes true, one of which must be
named; `also`: those that are true as well and no false alarm. Whatever else is named is one. A finished training is on file at
once.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.cli.console import console
from rollwright.config import RunConfig, load
from rollwright.observe.learning_verdict import judge_learning
from rollwright.run.folder import RunFolder
from rollwright.run.training import TrainingRun
from rollwright.run.training_record import read_steps

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "frozen_lake_train.yaml"
STEPS, FROM, SEEDS = 30, 10, 2
BASE = (
    f"policy.model={ROOT / 'models' / 'frozen_lake'}",
    "training.checkpoint_steps=1000",
    "training.signal_steps=1",
    "train_env_manager.num_env_groups=16",
    "rollout_batch_size=128",
    "max_inflight=128",
    "eval_steps=100000",
    "val_env_manager.num_env_groups=8",
)
KEPT = (
    "success",
    "silent_groups",
    "entropy",
    "clip_share",
    "gap",
    "updates",
    "tokens",
    "reward",
    "grad_norm",
    "gradient_signal",
    "gradient_noise",
)
DETOURS = "custom_envs.Lake.env_config.needs_detour=true"
LONG = (DETOURS, "custom_envs.Lake.env_config.min_distance=7")


@dataclass(frozen=True)
class Case:
    changes: Sequence[str]
    right: Sequence[str] = ()
    """Findings one of which is true by construction; none: the training is as it should be."""
    also: Sequence[str] = ()
    """Findings that are true here, too, or become so in the course of it."""
    steps: int = STEPS


EASY, HARD = "groups too easy", "groups too hard"
COLLAPSE, RATE = "entropy collapsing", "learning rate too high for the gap"
FALL, NOISE = "success falling", "gradient mostly noise"
RARE, CHAINS = "success is rare", "chains would do"
TREE = "strategy={kind: tree, width: 4, depth: 6, branch: {kind: keep_alive, alive: 8}}"
CASES: Mapping[str, Case] = {
    "as it should be": Case(()),
    "as it should be, async": Case(
        ("async_generation_ratio=1", "train_env_manager.num_env_groups=32", "max_inflight=256")
    ),
    "as it should be, 4 updates": Case(("training.mini_batches=4", "training.learning_rate=4e-4")),
    "no holes": Case(
        (
            "custom_envs.Lake.env_config.split=board",
            "custom_envs.Lake.env_config.p=0.97",
            "custom_envs.Lake.env_config.min_distance=1",
        ),
        (EASY,),
    ),
    "detours of 7 moves": Case(LONG, (HARD, RARE), (NOISE,)),
    "rate times 20": Case(
        ("training.learning_rate=2.4e-2",), (RATE, COLLAPSE, FALL), (HARD, EASY, NOISE, RARE)
    ),
    "rate times 20, 4 updates": Case(
        ("training.mini_batches=4", "training.learning_rate=2.4e-2"),
        (RATE, COLLAPSE, FALL),
        (HARD, EASY, NOISE, RARE),
    ),
    "groups of 96": Case(
        (
            "train_env_manager.group_size=96",
            "rollout_batch_size=1536",
            "max_inflight=1536",
            "policy.max_batch=1536",
        ),
        steps=12,
    ),
    "1 group of 4 and another": Case(
        (
            "train_env_manager.num_env_groups=2",
            "train_env_manager.group_size=4",
            "rollout_batch_size=8",
            "max_inflight=8",
        ),
        (NOISE,),
        (HARD, EASY),
        steps=60,
    ),
    "trees on easy lakes": Case(
        (
            TREE,
            "train_env_manager.group_size=2",
            "rollout_batch_size=32",
            "training.advantage={name: tree, options: {kappa: 2}}",
        ),
        (CHAINS,),
    ),
}


def train(case: Case, seed: int) -> list[dict[str, Any]]:
    changes = [f"seed={seed}", f"max_steps={case.steps}", *BASE, *case.changes]
    with tempfile.TemporaryDirectory() as runs:
        folder, config = RunFolder.create(Path(runs), load(CONFIG, changes))
        asyncio.run(TrainingRun(config, folder).run())
        steps = read_steps(folder.path)
    return [{name: row.get(name) for name in KEPT} for row in steps if "silent_groups" in row]


def settings(case: Case) -> RunConfig:
    return load(CONFIG, [*BASE, *case.changes])


def judged(case: Case, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often each finding was named in the verdicts of this training, and whether that was right."""
    config = settings(case)
    verdicts = [
        [each.what for each in judge_learning(steps[:end], config)] for end in range(FROM, len(steps) + 1)
    ]
    named = {
        what: sum(what in found for found in verdicts) / len(verdicts)
        for what in dict.fromkeys(each for found in verdicts for each in found)
    }
    wrong = {what for what in named if what not in (*case.right, *case.also)}
    return {
        "named": named,
        "at_the_end": verdicts[-1],
        "missed": bool(case.right) and not set(verdicts[-1]) & set(case.right),
        "false": sorted(wrong & set(verdicts[-1])),
        "verdicts": len(verdicts),
        "verdicts_with_a_false_alarm": sum(bool(wrong & set(found)) for found in verdicts),
    }


def write(runs: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = [
        {"case": case, "seed": int(seed), **judged(CASES[case], steps)}
        for key, steps in runs.items()
        for case, _, seed in [key.rpartition("/")]
    ]
    write_results("learning_verdicts", {"rows": rows, "runs": dict(runs)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    file, screen = RESULTS / "learning_verdicts.json", console()
    runs: dict[str, list[dict[str, Any]]] = {}
    if file.is_file():
        runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    for seed in range(asked.seeds):
        for name in asked.cases or CASES:
            if f"{name}/{seed}" in runs and not asked.again:
                continue
            runs[f"{name}/{seed}"] = train(CASES[name], seed)
            found = write(runs)[-1]
            screen.print(f"{name}, seed {seed}: {', '.join(found['at_the_end']) or 'the batches teach'}")
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("training", "seed", "at the end", "missed", "verdicts with a false alarm"):
        table.add_column(title)
    for row in write(runs):
        table.add_row(
            row["case"],
            str(row["seed"]),
            ", ".join(row["at_the_end"]),
            "missed" if row["missed"] else "",
            f"{row['verdicts_with_a_false_alarm']} of {row['verdicts']}",
        )
    screen.print(table)


if __name__ == "__main__":
    main()
