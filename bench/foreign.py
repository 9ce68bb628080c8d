"""Rollouts per second of one of verifiers' environments: by its own runner, and by the tag `verifiers:` here.

    python bench/foreign.py

Every arm is a process that plays the same four-turn episodes, 256 at a time, against the same simulated engine, which answers
at once; both sides run verifiers in the same interpreter. Arms take turns, and the median over the repeats counts. Rollouts
that fail, or end with another reward, leave no figure. The native runner's harness is a loop in its process, the lightest that
its contract allows; the shipped `null` harness starts a program for each answer, and 256 such programs do not fit on a small
machine.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
from asyncio.subprocess import PIPE
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from overhead_episode import Cell, Order, allow_open_files
from results_file import write_results
from rollwright.envs.adapters.verifiers import Verifiers
from rollwright.simulation.server_process import simulated_server

HERE = Path(__file__).resolve().parent
TASKSET = HERE / "foreign_taskset.py"
TURNS = 4
CONCURRENT = 256
TIMES = 3.0
"""What is promised: so many times the native runner's rollouts per second."""

CELL_SECONDS = 300
NATIVE, DIRECT, GATEWAY = (
    "verifiers, harness in process",
    "rollwright, direct",
    "rollwright, gateway",
)


@dataclass(frozen=True)
class Arm:
    name: str
    script: str
    choice: str
    """Harness or way."""
    concurrent: int
    rollouts: int
    repeats: int


ARMS = (
    Arm(NATIVE, "foreign_native.py", "foreign_harness", CONCURRENT, 512, 2),
    Arm(DIRECT, "foreign_rollwright.py", "direct", CONCURRENT, 1024, 2),
    Arm(GATEWAY, "foreign_rollwright.py", "gateway", CONCURRENT, 512, 2),
)


async def _cell(arm: Arm, python: Path, url: str, home: str) -> Cell:
    order = Order(url, arm.concurrent, arm.rollouts, min(arm.concurrent, arm.rollouts))
    process = await asyncio.create_subprocess_exec(
        python,
        HERE / arm.script,
        arm.choice,
        *order.words(),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "HOME": home} if arm.script == "foreign_native.py" else None,
    )
    try:
        async with asyncio.timeout(CELL_SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise SystemExit(f"{arm.name}: took longer than {CELL_SECONDS} s") from None
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise SystemExit(f"{arm.name}: exit code {process.returncode}: {lines[-1]}")
    cell = Cell(**json.loads(out.splitlines()[-1]))
    if cell.failed:
        raise SystemExit(f"{arm.name}: {cell.failed} of {cell.rollouts} rollouts failed")
    return cell


async def _measure(arms: list[Arm], native: Path, own: Path) -> dict[str, list[Cell]]:
    cells: dict[str, list[Cell]] = {}
    with tempfile.TemporaryDirectory() as home:
        async with simulated_server(filler=40, actions=("Right",)) as engine:
            for repeat in range(max(each.repeats for each in arms)):
                for arm in (each for each in arms if repeat < each.repeats):
                    python = native if arm.script == "foreign_native.py" else own
                    cells.setdefault(arm.name, []).append(await _cell(arm, python, engine.base_url, home))
    return cells


def _figures(arm: Arm, cells: list[Cell]) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "concurrent": arm.concurrent,
        "rollouts": arm.rollouts,
        "repeats": len(cells),
        "rollouts_per_second": statistics.median(each.rollouts_per_second for each in cells),
        "cpu_ms_per_rollout": statistics.median(1000 * each.cpu_seconds / each.rollouts for each in cells),
        "p50": statistics.median(each.p50 for each in cells),
        "library": cells[0].library,
        "cells": [asdict(each) for each in cells],
    }


def main(
    arm: Annotated[list[str] | None, typer.Option(help="Only these arms; default: all.")] = None,
) -> None:
    """Rollouts per second of the same environment by verifiers' own runner and by ours."""
    chosen = [each for each in ARMS if not arm or each.name in arm]
    if not chosen:
        raise SystemExit(f"--arm: accepted: {'; '.join(each.name for each in ARMS)}")
    allow_open_files(CONCURRENT)
    load, _, _ = os.getloadavg()
    native = Verifiers(str(TASKSET))._package.interpreter()
    cells = asyncio.run(_measure(chosen, native, Path(sys.executable)))
    figures = {each.name: _figures(each, cells[each.name]) for each in chosen}
    table = Table("arm", "at a time", "rollouts/s", "CPU ms per rollout", "median seconds")
    for name, each in figures.items():
        table.add_row(
            name,
            str(each["concurrent"]),
            f"{each['rollouts_per_second']:.1f}",
            f"{each['cpu_ms_per_rollout']:.1f}",
            f"{each['p50']:.2f}",
        )
    Console().print(table)
    if arm:
        return
    times = {
        name: figures[name]["rollouts_per_second"] / figures[NATIVE]["rollouts_per_second"]
        for name in (DIRECT, GATEWAY)
    }
    write_results(
        "foreign",
        {
            "load_before": round(load, 2),
            "turns": TURNS,
            "promised_times": TIMES,
            "times": times,
            "figures": list(figures.values()),
        },
    )
    met = times[DIRECT] >= TIMES
    Console().print(f"{'met' if met else 'missed'}: direct is {times[DIRECT]:.1f} times the native runner")
    if not met:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
