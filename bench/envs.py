"""How fast the environments are, and how that compares with PyPI's gym_sokoban.

    python bench/envs.py

Prints a table and writes `bench/results/envs.json`. Times are CPU time of the process that plays, so that a
busy machine matters little; only reasoning_gym, whose work is done in another process, is timed by the
clock. gym_sokoban gets a virtual environment of its own under `.venvs/`, made when it is not there yet.
Takes about a minute, and another one for that.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright import draws
from rollwright.envs import registry
from rollwright.envs.base import Env
from rollwright.errors import RollwrightError
from venvs import peer_python

ROOT = Path(__file__).resolve().parent.parent
PEER_PACKAGES = ["gym-sokoban==0.0.6", "gym==0.26.2", "numpy<2", "setuptools"]
"""The last release, and the last versions of what it needs that it works with."""

SECONDS = 2.0
"""Spent on each figure."""

WANTED_RATIO = 30.0
"""Times faster than gym_sokoban's own step a Sokoban step is meant to be."""

TAGS = [
    "FrozenLake",
    "SimpleSokoban",
    "LargerSokoban",
    "SokobanDifferentGridVocab",
    "gymnasium:FrozenLake-v1",
    "gymnasium:Taxi-v4",
    "reasoning_gym:basic_arithmetic",
]

PEER_SCRIPT = """
import json, random, sys, time
from gym_sokoban.envs.sokoban_env import SokobanEnv

seconds = float(sys.argv[1])

def measure(env, count_resets):
    done, count, spent, started = True, 0, 0.0, time.process_time()
    while time.process_time() - started < seconds:
        before = time.process_time()
        if done or count_resets:
            env.reset()
            done = False
            if count_resets:
                spent += time.process_time() - before
                count += 1
            continue
        _, _, done, _ = env.step(random.randrange(1, 5))
        spent += time.process_time() - before
        count += 1
    return count / spent

class WithoutPictures(SokobanEnv):
    def render(self, *args, **kwargs):
        return None

found = {}
for name, size, boxes in (("SimpleSokoban", 6, 1), ("LargerSokoban", 10, 2)):
    rooms = dict(dim_room=(size, size), num_boxes=boxes, max_steps=10)
    found[name] = {
        "steps_per_second": measure(SokobanEnv(**rooms), False),
        "steps_per_second_without_pictures": measure(WithoutPictures(**rooms), False),
        "resets_per_second": measure(SokobanEnv(**rooms), True),
    }
print(json.dumps(found))
"""


def main() -> None:
    console = Console()
    ours = asyncio.run(_measure_all(console))
    peer = _measure_peer(console)
    ratios = {
        name: {
            "step": ours[name]["steps_per_second"] / figures["steps_per_second"],
            "step_without_pictures": ours[name]["steps_per_second"]
            / figures["steps_per_second_without_pictures"],
            "reset": ours[name]["resets_per_second"] / figures["resets_per_second"],
        }
        for name, figures in peer.items()
    }
    _print(console, ours, peer, ratios)
    found = {
        "rollwright": ours,
        "gym_sokoban": peer,
        "times_faster": ratios,
    }
    console.print(f"written to {write_results('envs', found).relative_to(ROOT)}")


async def _measure_all(console: Console) -> dict[str, dict[str, float]]:
    found = {}
    for tag in TAGS:
        try:
            env = registry.make(tag)
        except RollwrightError as error:
            console.print(f"left out: {error}")
            continue
        clock = time.perf_counter if tag.startswith("reasoning_gym") else time.process_time
        found[tag] = {
            "steps_per_second": await _steps_per_second(env, clock),
            "resets_per_second": await _resets_per_second(env, clock),
        }
        await env.close()
    return found


async def _resets_per_second(env: Env, clock: Callable[[], float]) -> float:
    started, count = clock(), 0
    while clock() - started < SECONDS:
        await env.reset(count)
        count += 1
    return count / (clock() - started)


async def _steps_per_second(env: Env, clock: Callable[[], float]) -> float:
    """Random play: whole episodes, of which only the steps are timed."""
    began, spent, count, seed = clock(), 0.0, 0, 0
    while clock() - began < SECONDS:
        await env.reset(seed)
        chance = draws.generator("bench", seed)
        names = list(env.actions()) or ["1 + 1"]  # type: ignore[attr-defined]
        answers = [env.answer(names[int(chance.random() * len(names))]) for _ in range(10)]  # type: ignore[attr-defined]
        seed += 1
        started = clock()
        for answer in answers:
            step = await env.step(answer)
            count += 1
            if step.terminated or step.truncated:
                break
        spent += clock() - started
    return count / spent


def _measure_peer(console: Console) -> dict[str, dict[str, float]]:
    python = peer_python("gym-sokoban", PEER_PACKAGES, console)
    command = [str(python), "-c", PEER_SCRIPT, str(SECONDS)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    found: dict[str, dict[str, float]] = json.loads(printed.splitlines()[-1])  # it prints retries before
    return found


def _print(
    console: Console,
    ours: dict[str, dict[str, float]],
    peer: dict[str, dict[str, float]],
    ratios: dict[str, dict[str, float]],
) -> None:
    table = Table(title="environments", title_justify="left")
    table.add_column("environment")
    table.add_column("steps/s", justify="right")
    table.add_column("µs a step", justify="right")
    table.add_column("resets/s", justify="right")
    for name, figures in ours.items():
        table.add_row(name, *_row(figures["steps_per_second"], figures["resets_per_second"]))
    for name, figures in peer.items():
        table.add_row(
            f"gym_sokoban, as {name}", *_row(figures["steps_per_second"], figures["resets_per_second"])
        )
        table.add_row("  without pictures", *_row(figures["steps_per_second_without_pictures"], None))
    console.print(table)
    for name, ratio in ratios.items():
        verdict = "reached" if ratio["step"] >= WANTED_RATIO else "MISSED"
        console.print(
            f"{name}: a step is {ratio['step']:.0f} times as fast (wanted: {WANTED_RATIO:.0f}, {verdict}), "
            f"{ratio['step_without_pictures']:.1f} times without pictures; a reset {ratio['reset']:.1f} times"
        )


def _row(steps: float, resets: float | None) -> tuple[Any, ...]:
    return f"{steps:,.0f}", f"{1e6 / steps:,.1f}", "" if resets is None else f"{resets:,.0f}"


if __name__ == "__main__":
    main()
