"""How much CPU does a turn cost, beside the engine? Ours, a peer and the limit, in one run.

    python bench/overhead.py

Every arm is a client process of its own that plays the same four-turn rollouts against the same simulated
engine process, at several concurrencies; arms take turns, so that a busy moment of the machine hits all of
them, and the median over the repeats counts. The engine answers at once and says how many calls it got: an
arm that made more or fewer than its rollouts need, or failed at one of them, is a failure and not a figure.

A peer is many times slower, so it plays fewer rollouts, though never fewer than run at once, after a shorter
warm-up, and is repeated less often: see `ARMS`. All of it takes about five minutes on two idle cores. Only a
whole run writes `bench/results/overhead.json`.
"""

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from overhead_episode import TURNS, Cell, Order, allow_open_files
from overhead_report import Figures, Roles, judge, summarize, table
from results_file import write_results
from rollwright.simulation.server_process import RunningServer, simulated_server
from venvs import peer_python

HERE = Path(__file__).resolve().parent

CONCURRENT = (64, 256, 1024, 4096)

FILLER = 40
"""Tokens in front of the engine's answer: a sentence of reasoning."""

CELL_SECONDS = 300
"""Three times what the slowest cell takes; a client that is silent for so long hangs."""

UVLOOP = "uvloop==0.23.0"
"""The peers get the event loop that we have; it makes them about a tenth faster."""


@dataclass(frozen=True)
class Arm:
    name: str
    script: str
    pins: tuple[str, ...]
    """Packages of its own virtual environment; none: runs beside rollwright."""
    repeats: tuple[int, ...]
    """For each of `CONCURRENT`; 0 leaves it out."""
    rollouts: int
    """In a repeat, or as many as run at once if those are more."""
    warmup: int
    """Most rollouts before the clock starts."""

    def order(self, url: str, concurrent: int) -> Order:
        return Order(url, concurrent, max(self.rollouts, concurrent), min(self.warmup, concurrent))


ARMS = (
    Arm("bare aiohttp", "overhead_bare.py", (), (3, 3, 3, 2), rollouts=2048, warmup=4096),
    Arm("rollwright", "overhead_rollwright.py", (), (3, 3, 3, 2), rollouts=2048, warmup=4096),
    Arm("rollwright, SQLite", "overhead_durable.py", (), (3, 3, 3, 2), rollouts=2048, warmup=4096),
    Arm(
        "verifiers",
        "overhead_verifiers.py",
        ("verifiers==0.4.0", UVLOOP),
        (2, 2, 1, 1),
        rollouts=256,
        warmup=64,
    ),
    Arm(
        "verifiers 0.1",
        "overhead_verifiers_multiturn.py",
        ("verifiers==0.1.14", UVLOOP),
        (1, 1, 0, 0),
        rollouts=256,
        warmup=64,
    ),
)

ROLES = Roles(ours="rollwright", durable="rollwright, SQLite", limit="bare aiohttp", peer="verifiers")


class ClientFailed(Exception):
    """A client process ended without a figure; the message says why in one line."""


class Bench:
    """One run of the benchmark: what was measured so far."""

    def __init__(self, arms: Sequence[Arm], levels: Sequence[int], home: Path) -> None:
        self.failures: dict[str, str] = {}
        """Why a cell has no figures, by arm and concurrency."""
        self._arms = arms
        self._levels = levels
        self._home = home
        """Stands in for the peers' home folder, so that they leave nothing in the user's."""
        self._cells: dict[tuple[str, int], list[Cell]] = {}
        self._pythons: dict[str, Path] = {}

    @property
    def figures(self) -> dict[tuple[str, int], Figures]:
        return {key: summarize(key[0], cells) for key, cells in self._cells.items()}

    def prepare(self, console: Console) -> None:
        for arm in self._arms:
            name = arm.name.replace(" ", "-")
            self._pythons[arm.name] = (
                peer_python(name, arm.pins, console) if arm.pins else Path(sys.executable)
            )

    async def measure(self, engine: RunningServer, progress: Progress) -> None:
        plan = self._plan()
        bar = progress.add_task("", total=len(plan))
        for arm, concurrent in plan:
            progress.update(bar, description=f"{concurrent} concurrent: {arm.name}")
            label = f"{arm.name} at {concurrent}"
            if label not in self.failures:
                try:
                    cell = await self._cell(arm, engine, concurrent)
                    self._cells.setdefault((arm.name, concurrent), []).append(cell)
                except ClientFailed as failure:
                    self.failures[label] = str(failure)
            progress.advance(bar)

    def _plan(self) -> list[tuple[Arm, int]]:
        """Arms take turns within a concurrency."""
        return [
            (arm, concurrent)
            for place, concurrent in enumerate(CONCURRENT)
            if concurrent in self._levels
            for repeat in range(max(arm.repeats[place] for arm in self._arms))
            for arm in self._arms
            if repeat < arm.repeats[place]
        ]

    async def _cell(self, arm: Arm, engine: RunningServer, concurrent: int) -> Cell:
        order = arm.order(engine.base_url, concurrent)
        before = await _calls(engine)
        cell = await self._client(arm, order)
        if cell.failed:
            raise ClientFailed(f"{cell.failed} of {cell.rollouts} rollouts failed")
        calls = await _calls(engine) - before
        if calls != (expected := (order.rollouts + order.warmup) * TURNS):
            raise ClientFailed(f"the engine got {calls} calls, {expected} were due")
        return cell

    async def _client(self, arm: Arm, order: Order) -> Cell:
        process = await asyncio.create_subprocess_exec(
            self._pythons[arm.name],
            HERE / arm.script,
            *order.words(),
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, "HOME": str(self._home)},
        )
        try:
            async with asyncio.timeout(CELL_SECONDS):
                out, err = await process.communicate()
        except TimeoutError:
            raise ClientFailed(f"took longer than {CELL_SECONDS} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = err.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise ClientFailed(f"exit code {process.returncode}: {lines[-1]}")
        return Cell(**json.loads(out.splitlines()[-1]))


async def _calls(engine: RunningServer) -> int:
    async with aiohttp.request("GET", engine.stats_url) as response:
        return int((await response.json())["requests"])


async def _run(bench: Bench, console: Console) -> None:
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    async with simulated_server(filler=FILLER, actions=("Right",)) as engine:
        with Progress(*columns, console=console) as progress:
            await bench.measure(engine, progress)


def main(
    arm: Annotated[list[str] | None, typer.Option(help="Only these arms; default: all.")] = None,
    concurrent: Annotated[list[int] | None, typer.Option(help=f"Only these of {CONCURRENT}.")] = None,
) -> None:
    """CPU per turn and rollouts per second: bare aiohttp, rollwright, and verifiers in its own environment."""
    names = [each.name for each in ARMS]
    for wrong in [each for each in arm or () if each not in names]:
        raise SystemExit(f"--arm: {wrong!r} is unknown; accepted: {', '.join(names)}")
    for level in [each for each in concurrent or () if each not in CONCURRENT]:
        raise SystemExit(f"--concurrent: {level} is unknown; accepted: {', '.join(map(str, CONCURRENT))}")
    levels = concurrent or CONCURRENT
    allow_open_files(max(levels))
    console = Console()
    load, _, _ = os.getloadavg()
    with tempfile.TemporaryDirectory() as home:
        bench = Bench([each for each in ARMS if not arm or each.name in arm], levels, Path(home))
        bench.prepare(console)
        asyncio.run(_run(bench, console))
    figures = bench.figures
    targets = judge(figures, ROLES)
    if not arm and not concurrent:
        write_results(
            "overhead",
            {
                "load_before": round(load, 2),
                "turns": TURNS,
                "figures": [asdict(each) for each in figures.values()],
                "targets": [asdict(each) for each in targets],
                "failures": bench.failures,
            },
        )
    console.print(table(figures, ROLES))
    for target in targets:
        console.print(
            f"{'[green]met   [/]' if target.met else '[red]missed[/]'} {target.promise}: {target.measured}"
        )
    for label, why in bench.failures.items():
        console.print(f"[red]no figure[/] {label}: {why}", highlight=False)
    if bench.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
