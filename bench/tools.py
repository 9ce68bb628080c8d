"""What tools cost: calls side by side, the hand-over of a pooled resource, executions of the Python sandbox.

    python bench/tools.py

- **Calls of one turn**: eight calls that take 20 ms each, as coroutines and as plain functions in threads. The baseline
  runs them one after the other, as agents commonly do; the limit is the longest call.
- **Hand-over**: from the moment one rollout gives a resource back to the moment the next one in line has it, with 64
  rollouts and four resources. The baseline is an `asyncio.Semaphore`, which hands over a permit and no resource.
- **Executions**: `sum(range(100))` in a new sandbox each (of which two are started ahead, as the tool `python` has it), one after
  the other and four at a time, which keeps two cores busy, in one sandbox that keeps its state, and as baselines in a new
  `python -I -c` process each, which is not confined at all, and in the same under `bwrap`, with namespaces and a root of its
  own. Beside executions per second stands the processor time of each, of all processes involved, which other programs on
  the machine change less; and the memory of an idle sandbox, shared pages divided by those who share them (PSS).

Each figure is the median of five rounds, in which all ways take turns. Prints a table and writes
`bench/results/tools.json`. Takes about 40 seconds.
"""

import asyncio
import resource
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright.sandbox.client import AHEAD, SandboxFactory
from rollwright.tools import Pool, Toolbox, ToolContext, tool
from rollwright.trajectory import ToolCall

ROUNDS = 5
CALLS = 8
CALL_SECONDS = 0.02
RESOURCES, ROLLOUTS, LEASES = 4, 64, 20
"""Resources in the pool, rollouts that share them, and leases of each rollout in one round."""
FRESH, SIDE_BY_SIDE, KEPT, PROCESSES = 200, 4, 1000, 40
"""Executions of one round: in new sandboxes, how many of those at a time, in one that keeps its state, and in processes."""
IDLE = 100
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
    sandboxes = SandboxFactory(ahead=AHEAD)
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

    async def processes(*command: str) -> None:
        for _ in range(PROCESSES):
            process = await asyncio.create_subprocess_exec(
                *command, sys.executable, "-I", "-c", f"print({CODE})", stdout=asyncio.subprocess.PIPE
            )
            await process.communicate()

    ways: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
        "fresh": (FRESH, lambda: fresh(FRESH)),
        "fresh_side_by_side": (FRESH, side_by_side),
        "persistent": (KEPT, with_state),
        "plain_process": (PROCESSES, processes),
    }
    if bwrap := shutil.which("bwrap"):
        ways["bwrap"] = (PROCESSES, lambda: processes(bwrap, *bwrap_options()))
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (count, work) in ways.items():
            cpu = cpu_seconds(sandboxes)
            took = await seconds(work)
            await asyncio.sleep(0.05)  # the last sandbox exits behind its client's back
            rounds[name].append((count / took, 1000 * (cpu_seconds(sandboxes) - cpu) / count))
    figures = {name: median(rate for rate, _ in each) for name, each in rounds.items()}
    # What runs under bwrap is waited for by a process of bwrap's own, so its processor time is not known here.
    figures |= {
        f"{name}_cpu_ms": median(cpu for _, cpu in each) for name, each in rounds.items() if name != "bwrap"
    }
    kept.close()
    sandboxes.close()
    figures["ahead"] = AHEAD
    figures["idle_kib"] = await idle_memory()
    return figures


def bwrap_options() -> list[str]:
    shown = [each for each in ("/usr", "/lib", "/lib64", sys.base_prefix, sys.prefix) if Path(each).exists()]
    binds = [word for each in shown for word in ("--ro-bind", each, each)]
    return ["--unshare-all", "--die-with-parent", "--tmpfs", "/tmp", *binds]


def spawner(sandboxes: SandboxFactory) -> psutil.Process:
    server = sandboxes._fork_server.process
    assert server is not None
    (found,) = psutil.Process(server.pid).children()
    return found


def cpu_seconds(sandboxes: SandboxFactory) -> float:
    """Processor time of this process, of programs that it has waited for, and of the sandboxes that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    of = spawner(sandboxes).cpu_times()
    return float(
        time.process_time()
        + sum((ended.ru_utime, ended.ru_stime))
        + sum((of.user, of.system, of.children_user, of.children_system))
    )


async def idle_memory() -> float:
    """KiB of memory that each of a hundred idle sandboxes takes."""
    sandboxes = SandboxFactory()
    several = [await sandboxes.open() for _ in range(IDLE)]
    for each in several:
        await each.run(CODE)
    processes = spawner(sandboxes).children()
    taken = [each.memory_full_info().pss for each in processes]
    sandboxes.close()
    return float(sum(taken)) / len(taken) / 1024


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
        ("bwrap", "new process under bwrap each"),
        ("persistent", "one sandbox that keeps its state"),
    ):
        if name in row:
            cpu = row.get(f"{name}_cpu_ms")
            rates = f"{row[name]:.0f} /s" + (f", {cpu:.2f} ms of CPU" if cpu is not None else "")
            others = f"{plain:.0f} /s, {row['plain_process_cpu_ms']:.2f} ms of CPU"
            table.add_row(shown, rates, others, "–", f"{row[name] / plain:.1f}×")
    table.add_row("memory of an idle sandbox", f"{row['idle_kib']:.0f} KiB", "–", "–", "–")
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
