"""What a box costs: start, run, fork and stop, and eight in parallel, on every backend that runs here, beside bare programs.

    python bench/boxes.py

The arms take turns in the same run, so that other work on the machine moves all of them; figures are milliseconds on the clock,
median and lower quartile. A bare `bwrap` mounts an overlay and runs `true` in it; a bare `podman run` runs `true` in the same
image. `overhead` is the start of a box less its bare arm, round by round. Pods and hosted sandboxes run on the simulated
services of this package, whose own boxes are part of the figures. At the end 64 boxes of bubblewrap run at once: how much
memory each takes, and the longest that one of them had to wait for a command.
"""

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from results_file import write_results
from rollwright.sandbox import cgroups
from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.box import Box, BoxBackend, BoxLabel, BoxSpec, Feature
from rollwright.sandbox.building import add_folder, engine_environment, offer_image
from rollwright.sandbox.images import host_image
from rollwright.sandbox.leases import STATE_VARIABLE, list_records
from rollwright.simulation.e2b_server import SimulatedE2B
from rollwright.simulation.kubernetes_server import SimulatedCluster

ROUNDS = 30
SLOW_ROUNDS = 7
"""Rounds of backends whose start takes a third of a second and more."""

PARALLEL = 8
MANY = 64
LABEL = BoxLabel(worker="bench")
SMALL = ("sh", "bash", "true", "sleep", "timeout", "mkdir", "tar")

Milliseconds = defaultdict[str, list[float]]


class Arm:
    """One backend and its bare counterpart."""

    def __init__(
        self,
        name: str,
        backend: BoxBackend,
        spec: BoxSpec,
        rounds: int,
        bare: Callable[[int], list[str]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`bare`: command of the bare arm, by the number of its folder."""
        self.name, self.backend, self.spec, self.rounds = name, backend, spec, rounds
        self._bare, self._environment = bare, environment
        self.taken: Milliseconds = defaultdict(list)

    async def start(self) -> Box:
        return await self.backend.start(self.spec, LABEL)

    async def play_round(self) -> None:
        if self._bare is not None:
            command = self._bare(0)
            await self._time("bare: start, true, end", lambda: self._run_bare(command))
        box = await self._time("start", self.start)
        if self._bare is not None:
            self.taken["overhead"].append(self.taken["start"][-1] - self.taken["bare: start, true, end"][-1])
        await self._time("run", lambda: box.run("true"))
        if Feature.FORK in self.backend.features:
            forked = await self._time("fork", box.fork)
            await forked.stop()
        await self._time("stop", box.stop)

    async def play_parallel(self) -> None:
        if self._bare is not None:
            commands = [self._bare(number) for number in range(PARALLEL)]
            await self._time(
                f"bare: {PARALLEL} in parallel", lambda: asyncio.gather(*map(self._run_bare, commands))
            )
        boxes = await self._time(
            f"{PARALLEL} starts in parallel", lambda: asyncio.gather(*(self.start() for _ in range(PARALLEL)))
        )
        await asyncio.gather(*(each.stop() for each in boxes))

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            name: {
                "median": round(statistics.median(each), 1),
                "lower quartile": round(statistics.quantiles(each, n=4)[0] if len(each) > 1 else each[0], 1),
            }
            for name, each in self.taken.items()
        }

    async def _time(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        began = time.perf_counter()
        made = await work()
        self.taken[name].append(1000 * (time.perf_counter() - began))
        return made

    async def _run_bare(self, command: list[str]) -> None:
        process = await asyncio.create_subprocess_exec(
            *command, env=self._environment, stdout=subprocess.DEVNULL
        )
        if await process.wait() != 0:
            raise SystemExit(f"a bare run failed: {' '.join(command)}")


def bare_bubblewrap(folder: Path, state: Path) -> Callable[[int], list[str]]:
    """A shell that mounts an overlay in a namespace of its own and becomes bubblewrap in it."""
    skeleton, host_mounts = host_image(state)
    mounts = [word for each in host_mounts for word in ("--ro-bind", each.source, each.path)]

    def command(number: int) -> list[str]:
        place = folder / f"bare{number}"
        for name in ("upper", "work", "merged"):
            shutil.rmtree(place / name, ignore_errors=True)
            (place / name).mkdir(parents=True)
        options = f"lowerdir={skeleton},upperdir={place}/upper,workdir={place}/work,userxattr"
        words = " ".join(
            ["bwrap", "--bind", f"{place}/merged", "/", *mounts, "--dev", "/dev", "--proc", "/proc"]
        )
        inner = f"mount -t overlay overlay -o {options} {place}/merged && exec {words} --unshare-all --die-with-parent true"
        return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inner]

    return command


def small_image(folder: Path) -> Path:
    """A root file system for podman from a few programs of this machine."""
    root = folder / "small"
    for name in ("bin", "etc", "tmp", "proc", "dev"):
        (root / name).mkdir(parents=True)
    for name in SMALL:
        source = Path(shutil.which(name) or name).resolve()
        shutil.copy(source, root / "bin" / name)
        for word in subprocess.run(["ldd", str(source)], capture_output=True, text=True).stdout.split():
            if word.startswith("/"):
                (root / word.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, root / word.lstrip("/"))
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    return root


async def make_arms(folder: Path, stack: AsyncExitStack) -> tuple[list[Arm], dict[str, str]]:
    """The arms that run here, and why others do not."""
    state = folder / "state"
    os.environ[STATE_VARIABLE] = str(state)
    arms, missing = [], {}
    bubblewrap = make_backend("bubblewrap", state=str(state))
    arms.append(Arm("bubblewrap", bubblewrap, BoxSpec(), ROUNDS, bare_bubblewrap(folder, state)))
    for name in ("podman", "docker"):
        backend = make_backend(name, state=str(state))
        stack.push_async_callback(backend.aclose)
        if why := await check_backend(backend):
            missing[name] = why
            continue
        await asyncio.to_thread(add_folder, state, small_image(folder / name), f"small-{name}")
        reference = await asyncio.to_thread(offer_image, state, f"small-{name}", name)
        bare = [name, "run", "--rm", "--network", "none", reference, "true"]
        arms.append(
            Arm(
                name,
                backend,
                BoxSpec(image=f"small-{name}"),
                SLOW_ROUNDS,
                lambda _, bare=bare: bare,  # type: ignore[misc]
                engine_environment(state),
            )
        )
    cluster = SimulatedCluster({"host": BoxSpec(), "debian": BoxSpec()}, state=folder / "cluster")
    await cluster.start()
    kubeconfig = cluster.write_kubeconfig(folder / "kubeconfig")
    hosted = SimulatedE2B({"debian": BoxSpec()}, state=folder / "hosted")
    await hosted.start()
    os.environ["E2B_API_KEY"] = hosted.key
    place = {"api_url": hosted.url, "sandbox_url": hosted.url, "http_version": "1.1"}
    pods = make_backend("kubernetes", state=str(folder / "pods"), kubeconfig=str(kubeconfig))
    sandboxes = make_backend("e2b", state=str(folder / "e2b"), **place)
    for service, backend in ((cluster, pods), (hosted, sandboxes)):
        stack.push_async_callback(service.close)
        stack.push_async_callback(backend.aclose)
        arms.append(Arm(f"{backend.name} (simulated)", backend, BoxSpec(image="debian"), SLOW_ROUNDS))
    stack.push_async_callback(bubblewrap.aclose)
    return arms, missing


async def measure(folder: Path) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        arms, missing = await make_arms(folder, stack)
        for arm in arms:  # servers start once
            await (await arm.start()).stop()
        for number in range(ROUNDS):
            for arm in arms:
                if number < arm.rounds:
                    await arm.play_round()
        for _ in range(3):
            for arm in arms:
                await arm.play_parallel()
        return {
            "milliseconds": {arm.name: arm.figures() for arm in arms},
            "does_not_run_here": missing,
            "load_of_the_machine": round(os.getloadavg()[0], 1),
            **await measure_many(arms[0].backend),
        }


async def measure_many(backend: BoxBackend) -> dict[str, Any]:
    """64 boxes at once, each with a program of its own."""
    boxes = await asyncio.gather(*(backend.start(BoxSpec(memory_mb=256), LABEL) for _ in range(MANY)))

    async def run(box: Box) -> float:
        began = time.perf_counter()
        result = await box.run("sleep 9 & echo ok")
        assert result.stdout == "ok\n"
        return time.perf_counter() - began

    waits = await asyncio.gather(*map(run, boxes))
    inside = [cgroups.memory_used(cgroups.group_folders(box.id)) for box in boxes]
    outside = [pss_of(record.holder) for record in list_records(Path(os.environ[STATE_VARIABLE]))]
    return {
        "boxes_at_once": MANY,
        "memory_of_each_mb": round(statistics.mean(inside) / (1 << 20), 2),
        "memory_of_its_processes_with_the_holder_mb": round(statistics.mean(outside) / (1 << 20), 2),
        "median_wait_for_a_command_s": round(statistics.median(waits), 2),
        "longest_wait_for_a_command_s": round(max(waits), 2),
    }


def pss_of(holder: int) -> int:
    """Bytes of a holder and everything it has started, pages that processes share counted once."""
    total = 0
    process = psutil.Process(holder)
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            total += each.memory_full_info().pss
    return total


def main() -> None:
    if shutil.which("bwrap") is None or os.geteuid() != 0:
        raise SystemExit("needs bubblewrap, and root for the bare arm")
    with TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder)))
    for name, taken in figures["milliseconds"].items():
        for what, each in taken.items():
            print(f"{name:26} {what:26} {each['median']:8} {each['lower quartile']:8}")
    for name, value in figures.items():
        if name != "milliseconds":
            print(f"{name:50} {value}")
    write_results("boxes", figures)


if __name__ == "__main__":
    sys.exit(main())
