"""How fast the environments are, and how that compares with PyPI's gym_sokoban and with a bare call of reasoning-gym.

    python bench/envs.py
    python bench/envs.py scoring        # only reasoning-gym; the other figures stay

Prints a table and writes `bench/results/envs.json`. Times are CPU time of the process that plays, so that a
busy machine matters little; only reasoning_gym, whose work is done in another process, is timed by the
clock. gym_sokoban gets a virtual environment of its own under `.venvs/`, made when it is not there yet.
Takes about a minute, and another one for that.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results_file import RESULTS, write_results
from rollwright import rng
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

SCORED = ["basic_arithmetic", "countdown", "binary_matrix", "simple_integration"]
"""Datasets of reasoning-gym: one that only compares, and one for each kind of reader."""

AT_ONCE = 64
"""Episodes that are scored at the same time in the second figure."""

WANTED_STEPS = 1_500
"""Answers to basic_arithmetic that are meant to be scored in a second, one after the other."""

TAGS = [
    "FrozenLake",
    "SimpleSokoban",
    "LargerSokoban",
    "SokobanDifferentGridVocab",
    "gymnasium:FrozenLake-v1",
    "gymnasium:Taxi-v4",
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


BARE_SCRIPT = """
import json, sys, time
from reasoning_gym.factory import create_dataset

seconds, found = float(sys.argv[1]), {}
for name in sys.argv[2:]:
    steps = resets = seed = 0
    scoring = making = 0.0
    while scoring + making < seconds:
        began = time.perf_counter()
        dataset = create_dataset(name, seed=seed, size=1)
        entry = dataset[0]
        making += time.perf_counter() - began
        resets += 1
        seed += 1
        for answer in (entry["answer"], "1 + 1"):
            began = time.perf_counter()
            dataset.score_answer(answer, entry)
            scoring += time.perf_counter() - began
            steps += 1
    found[name] = {"steps_per_second": steps / scoring, "resets_per_second": resets / making}
print(json.dumps(found))
"""


def main() -> None:
    console = Console()
    scored = {"scoring_bare": _measure_bare(), **asyncio.run(_measure_scoring())}
    _print_scoring(console, scored)
    if sys.argv[1:] == ["scoring"]:
        kept = json.loads((RESULTS / "envs.json").read_text(encoding="utf-8"))
        found = {**{key: kept[key] for key in ("rollwright", "gym_sokoban", "times_faster")}, **scored}
        console.print(f"written to {write_results('envs', found).relative_to(ROOT)}")
        return
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
        **scored,
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
        found[tag] = {
            "steps_per_second": await _steps_per_second(env, time.process_time),
            "resets_per_second": await _resets_per_second(env, time.process_time),
        }
        await env.close()
    return found


async def _measure_scoring() -> dict[str, Any]:
    """By the clock: the work is done in other processes."""
    ours = {}
    for name in SCORED:
        env = registry.make(f"reasoning_gym:{name}")
        ours[name] = {
            "steps_per_second": await _answers_per_second(name, 1),
            "steps_per_second_at_once": await _answers_per_second(name, AT_ONCE),
            "resets_per_second": await _resets_per_second(env, time.perf_counter),
        }
        await env.close()
    return {"scoring": ours, "scoring_at_once": AT_ONCE}


def _measure_bare() -> dict[str, dict[str, float]]:
    command = [sys.executable, "-c", BARE_SCRIPT, str(SECONDS), *SCORED]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, dict[str, float]] = json.loads(printed.splitlines()[-1])
    return found


async def _answers_per_second(name: str, at_once: int) -> float:
    """Right and wrong answers in turn; only judging them is timed."""
    envs = [registry.make(f"reasoning_gym:{name}") for _ in range(at_once)]
    spent, count, seed = 0.0, 0, 0
    while spent < SECONDS:
        answers = []
        for env in envs:
            await env.reset(seed % 50)
            best = env.best_action()  # type: ignore[attr-defined]
            answers.append(env.answer(best if best is not None and seed % 2 else "1 + 1"))  # type: ignore[attr-defined]
            seed += 1
        began = time.perf_counter()
        await asyncio.gather(*(env.step(answer) for env, answer in zip(envs, answers, strict=True)))
        spent += time.perf_counter() - began
        count += at_once
    return count / spent


def _print_scoring(console: Console, scored: dict[str, Any]) -> None:
    table = Table(title="answers to reasoning-gym, by the clock", title_justify="left")
    for head in (
        "dataset",
        "one by one, per s",
        f"{AT_ONCE} at once, per s",
        "resets/s",
        "bare call, per s",
        "share",
    ):
        table.add_column(head, justify="left" if head == "dataset" else "right")
    for name, ours in scored["scoring"].items():
        bare = scored["scoring_bare"][name]["steps_per_second"]
        best = max(ours["steps_per_second"], ours["steps_per_second_at_once"])
        figures = (*ours.values(), bare)
        table.add_row(name, *(f"{each:,.0f}" for each in figures), f"{best / bare:.2%}")
    console.print(table)
    reached = scored["scoring"]["basic_arithmetic"]["steps_per_second"]
    verdict = "reached" if reached >= WANTED_STEPS else "MISSED"
    console.print(f"basic_arithmetic: {reached:,.0f} answers a second (wanted: {WANTED_STEPS:,}, {verdict})")


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
        chance = rng.generator("bench", seed)
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
