"""What a box costs: start, run, fork and stop, and eight in parallel, beside a bare `bwrap`.

    python bench/boxes.py

The arms take turns in the same run, so that other work on the machine moves all of them. Figures are medians of seconds on
the clock. `overhead` is the start of a box less that of a bare `bwrap` over an overlay that is mounted for it. At the end 64
boxes run at once: how much memory each takes, and the longest that one of them had to wait for a command.
"""

import asyncio
import os
import shutil
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from results_file import write_results
from rollwright.sandbox import cgroups
from rollwright.sandbox.box import Box, BoxLabel, BoxSpec
from rollwright.sandbox.bubblewrap import BubblewrapBackend
from rollwright.sandbox.images import host_image

ROUNDS = 15
PARALLEL = 8
MANY = 64

Seconds = dict[str, list[float]]


async def timed(seconds: Seconds, name: str, work: Callable[[], Awaitable[object]]) -> object:
    began = time.perf_counter()
    made = await work()
    seconds.setdefault(name, []).append(time.perf_counter() - began)
    return made


def bare_command(folder: Path, skeleton: Path, mounts: list[str]) -> list[str]:
    """A shell that mounts an overlay in a namespace of its own and becomes bubblewrap in it."""
    for name in ("upper", "work", "merged"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    options = f"lowerdir={skeleton},upperdir={folder}/upper,workdir={folder}/work,userxattr"
    words = " ".join(
        ["bwrap", "--bind", f"{folder}/merged", "/", *mounts, "--dev", "/dev", "--proc", "/proc"]
    )
    inner = f"mount -t overlay overlay -o {options} {folder}/merged && exec {words} --unshare-all --die-with-parent true"
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inner]


async def bare(command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    if await process.wait() != 0:
        raise SystemExit(f"a bare run failed: {' '.join(command)}")


async def measure(folder: Path) -> dict[str, object]:
    backend = BubblewrapBackend(state=str(folder / "state"))
    skeleton, host_mounts = host_image(backend.state)
    mounts = [word for each in host_mounts for word in ("--ro-bind", each.source, each.path)]
    label = BoxLabel(worker="bench")
    seconds: Seconds = {}

    async def start() -> Box:
        return await backend.start(BoxSpec(), label)

    await (await start()).stop()  # the fork server starts once
    for _ in range(ROUNDS):
        command = bare_command(folder / "bare", skeleton, mounts)
        await timed(seconds, "bare bwrap: start, true, end", lambda command=command: bare(command))  # type: ignore[misc]
        box = await timed(seconds, "box: start", start)
        await timed(seconds, "box: run", lambda box=box: box.run("true"))  # type: ignore[misc,attr-defined]
        forked = await timed(seconds, "box: fork", lambda box=box: box.fork())  # type: ignore[misc,attr-defined]
        await timed(seconds, "box: stop", lambda box=box: box.stop())  # type: ignore[misc,attr-defined]
        await forked.stop()  # type: ignore[attr-defined]
    for _ in range(3):
        commands = [bare_command(folder / f"bare{n}", skeleton, mounts) for n in range(PARALLEL)]
        await timed(
            seconds,
            f"bare bwrap: {PARALLEL} in parallel",
            lambda commands=commands: asyncio.gather(*map(bare, commands)),  # type: ignore[misc]
        )
        boxes = await timed(
            seconds,
            f"box: {PARALLEL} starts in parallel",
            lambda: asyncio.gather(*(start() for _ in range(PARALLEL))),
        )
        await asyncio.gather(*(each.stop() for each in boxes))  # type: ignore[attr-defined]
    many = await measure_many(backend, label)
    await backend.aclose()
    return {
        "milliseconds": {name: round(1000 * statistics.median(each), 1) for name, each in seconds.items()},
        **many,
    }


async def measure_many(backend: BubblewrapBackend, label: BoxLabel) -> dict[str, object]:
    """64 boxes at once, each with a program of its own."""
    before = available()
    boxes = await asyncio.gather(*(backend.start(BoxSpec(memory_mb=256), label) for _ in range(MANY)))
    waits: Seconds = {}
    results = await asyncio.gather(
        *(timed(waits, "run", lambda box=box: box.run("sleep 9 & echo ok")) for box in boxes)
    )
    assert all(each.stdout == "ok\n" for each in results)  # type: ignore[attr-defined]
    inside = [cgroups.memory_used(cgroups.group_folders(box.id)) for box in boxes]
    taken = (before - available()) / MANY
    return {
        "boxes_at_once": MANY,
        "memory_of_each_mb": round(statistics.mean(inside) / (1 << 20), 2),
        "memory_taken_from_the_machine_for_each_mb": round(taken / (1 << 20), 2),
        "longest_wait_for_a_command_s": round(max(waits["run"]), 2),
    }


def available() -> int:
    line = next(
        each for each in Path("/proc/meminfo").read_text().splitlines() if each.startswith("MemAvailable")
    )
    return int(line.split()[1]) * 1024


def main() -> None:
    if shutil.which("bwrap") is None or os.geteuid() != 0:
        raise SystemExit("needs bubblewrap, and root for the bare arm")
    with TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder)))
    times = figures["milliseconds"]
    assert isinstance(times, dict)
    figures["overhead_ms"] = round(times["box: start"] - times["bare bwrap: start, true, end"], 1)
    for name, value in {**times, **{k: v for k, v in figures.items() if k != "milliseconds"}}.items():
        print(f"{name:50} {value}")
    write_results("boxes", figures)


if __name__ == "__main__":
    sys.exit(main())
