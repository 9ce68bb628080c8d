"""The language model's demo: no pair of numbers is in two rows, and no held-out row is trained on."""

import json
import re
from pathlib import Path

from rollwright.aio import run_virtual
from rollwright.config import load
from rollwright.run.run import Run
from rollwright.trajectory import Trajectory

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "smollm2_larger_number.yaml"
ROWS = ROOT / "configs" / "tasks" / "larger_number.jsonl"


def pair(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\d+", text))


def test_every_pair_of_numbers_is_in_one_row_with_the_larger_as_its_answer() -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    assert len({pair(row["question"]) for row in rows}) == len(rows)
    assert all(max(map(int, pair(row["question"]))) == int(row["answer"]) for row in rows)
    first = sum(re.findall(r"\d+", row["question"])[0] == row["answer"] for row in rows) / len(rows)
    assert 0.45 < first < 0.55, "the place of the larger number says nothing"


def test_no_held_out_row_is_in_what_a_run_trains_on() -> None:
    steps = 40
    simulated = "policy={kind: simulated, skill: 0.5, tokens_per_second: 100000}"
    config = load(CONFIG, [simulated, "training=null", f"max_steps={steps}"])

    async def play() -> tuple[list[Trajectory], list[Trajectory]]:
        trained: list[Trajectory] = []
        async with Run(config) as run:
            validated = (await run.evaluate(0)).trajectories
            for _ in range(steps):
                trained += (await run.get_batch()).trajectories
        return trained, list(validated)

    trained, validated = run_virtual(play())
    asked = {pair(each.opening[-1].content) for each in trained}
    held_out = {pair(each.opening[-1].content) for each in validated}
    assert len(held_out) == 128
    assert len(asked) == steps * 8
    assert not asked & held_out
