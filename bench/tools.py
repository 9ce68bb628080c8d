"""What tools cost: calls side by side, the hand-over of a pooled resource, executions of the Python sandbox.

    python bench/tools.py

- **Calls of one turn**: eight calls that take 20 ms each, as coroutines and as plain functions in threads. The baseline
  runs them one after the other, as agents commonly do; the limit is the longest call.
- **Hand-over**: from the moment one rollout gives a resource back to the moment the next one in line has it, with 64
  rollouts and four resources. The baseline is an `asyncio.Semaphore`, which hands over a permit and no resource.
- **Executions**: `sum(range(100))` in a new sandbox each, in one sandbox that keeps its state, and as the baseline in a
  new `python -I -c` process each, which is not confined at all.

Each figure is the median of five rounds. Prints a table and writes `bench/results/tools.json`. Takes about 20 seconds.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright.sandbox.client import SandboxFactory
from rollwright.tools import Pool, Toolbox, ToolContext, tool
from rollwright.trajectory import ToolCall

ROUNDS = 5
CALLS = 8
CALL_SECONDS = 0.02
RESOURCES, ROLLOUTS, LEASES = 4, 64, 20
"""Resources in the pool, rollouts that share them, and leases of each rollout in one round."""
FRESH, SIDE_BY_SIDE, KEPT = 40, 4, 1000
"""Executions of one round: in new sandboxes, how many of those at a time, and in one that keeps its state."""
CODE = "sum(range(100))"


@tool
async def wait_async() -> None:
    await asyncio.sleep(CALL_SECONDS)


@tool
def wait_in_thread() -> None:
    time.sleep(CALL_SECONDS)


async def seconds(work: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def middle(work: Callable[[], Awaitable[Any]]) -> float:
    return median([await seconds(work) for _ in range(ROUNDS)])


async def calls_of_one_turn(name: str) -> dict[str, float]:
    box = Toolbox([wait_async, wait_in_thread])
    calls = [ToolCall(f"c{at}", name, "{}") for at in range(CALLS)]
    async with ToolContext("bench") as context:

        async def one_by_one() -> None:
            for call in calls:
                await box.run([call], context)

        ours = await middle(lambda: box.run(calls, context))
        return {
            "ours": 1000 * ours,
            "baseline": 1000 * await middle(one_by_one),
            "limit": 1000 * CALL_SECONDS,
        }


async def hand_overs(acquire: Callable[[], Awaitable[Callable[[], object]]]) -> float:
    """Median microseconds from giving back to the next one's having it."""
    given_back = 0.0
    took: list[float] = []

    async def rollout() -> None:
        nonlocal given_back
        for _ in range(LEASES):
            release = await acquire()
            if given_back:
                took.append(time.perf_counter() - given_back)
            await asyncio.sleep(0)
            given_back = time.perf_counter()
            release()

    await asyncio.gather(*(rollout() for _ in range(ROLLOUTS)))
    return 1e6 * median(took)


async def hand_over() -> dict[str, float]:
    async def make(key: object) -> object:
        return object()

    ours, baseline = [], []
    for _ in range(ROUNDS):
        pool = Pool(make, size=RESOURCES)
        gate = asyncio.Semaphore(RESOURCES)

        async def lease(pool: Pool[object] = pool) -> Callable[[], object]:
            return (await pool.acquire()).release

        async def permit(gate: asyncio.Semaphore = gate) -> Callable[[], object]:
            await gate.acquire()
            return gate.release

        ours.append(await hand_overs(lease))
        baseline.append(await hand_overs(permit))
    return {"ours": median(ours), "baseline": median(baseline)}


async def executions() -> dict[str, float]:
    sandboxes = SandboxFactory()
    kept = await sandboxes.open()

    async def fresh(count: int) -> None:
        for _ in range(count):
            sandbox = await sandboxes.open()
            await sandbox.run(CODE)
            sandbox.close()

    async def side_by_side() -> None:
        await asyncio.gather(*(fresh(FRESH // SIDE_BY_SIDE) for _ in range(SIDE_BY_SIDE)))

    async def with_state() -> None:
        for _ in range(KEPT):
            await kept.run(CODE)

    async def plain_process() -> None:
        for _ in range(FRESH):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-c", f"print({CODE})", stdout=asyncio.subprocess.PIPE
            )
            await process.communicate()

    figures = {
        "fresh": FRESH / await middle(lambda: fresh(FRESH)),
        "fresh_side_by_side": FRESH / await middle(side_by_side),
        "persistent": KEPT / await middle(with_state),
        "plain_process": FRESH / await middle(plain_process),
    }
    kept.close()
    sandboxes.close()
    return figures


def show(console: Console, figures: dict[str, dict[str, float]]) -> None:
    table = Table("", "ours", "baseline", "limit", "ours to baseline", title="Tools")
    for name in ("wait_async", "wait_in_thread"):
        row = figures[name]
        cells = [f"{row[each]:.1f} ms" for each in ("ours", "baseline", "limit")]
        table.add_row(f"{CALLS} calls of one turn, {name}", *cells, f"{row['ours'] / row['baseline']:.2f}×")
    row = figures["hand_over"]
    cells = [f"{row['ours']:.0f} µs", f"{row['baseline']:.0f} µs", "–"]
    table.add_row("hand-over of a resource", *cells, f"{row['ours'] / row['baseline']:.2f}×")
    row = figures["executions"]
    plain = row["plain_process"]
    for name, shown in (
        ("fresh", "new sandbox each"),
        ("fresh_side_by_side", f"new sandbox each, {SIDE_BY_SIDE} at a time"),
        ("persistent", "one sandbox that keeps its state"),
    ):
        table.add_row(shown, f"{row[name]:.0f} /s", f"{plain:.0f} /s", "–", f"{row[name] / plain:.1f}×")
    console.print(table)


async def all_figures() -> dict[str, dict[str, float]]:
    return {
        "wait_async": await calls_of_one_turn("wait_async"),
        "wait_in_thread": await calls_of_one_turn("wait_in_thread"),
        "hand_over": await hand_over(),
        "executions": await executions(),
    }


def main() -> None:
    console = Console()
    figures = asyncio.run(all_figures())
    show(console, figures)
    console.print(f"written to {write_results('tools', figures)}")


if __name__ == "__main__":
    main()
