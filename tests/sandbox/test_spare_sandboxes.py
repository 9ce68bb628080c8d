"""Sandboxes that are started ahead are few, as confined and as new as any other, and never handed out dead."""

import asyncio
import os
import platform
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from rollwright.sandbox.client import SandboxFactory
from rollwright.sandbox.protocol import SandboxLimits

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="confinement needs Linux on x86-64 or ARM64",
)

LIMITS = SandboxLimits(seconds=5, cpu_seconds=20, memory=128 << 20, disk=4 << 20, threads=8)


@pytest.fixture
def sandboxes() -> Iterator[SandboxFactory]:
    made = SandboxFactory(LIMITS, ahead=2)
    yield made
    made.close()


def processes(sandboxes: SandboxFactory) -> list[psutil.Process]:
    server = sandboxes._fork_server.process
    assert server is not None
    (spawner,) = psutil.Process(server.pid).children()
    return list(spawner.children())


async def count(sandboxes: SandboxFactory, wanted: int) -> None:
    async with asyncio.timeout(30):
        while len(processes(sandboxes)) != wanted:
            await asyncio.sleep(0.01)


async def test_one_sandbox_alone_has_no_spares_and_more_have_two(sandboxes: SandboxFactory) -> None:
    first = await sandboxes.open()
    assert len(processes(sandboxes)) == 1
    several = [await sandboxes.open() for _ in range(3)]
    await count(sandboxes, 4 + 2)
    for each in (first, *several):
        each.close()
    await count(sandboxes, 2)


async def test_a_spare_is_new_and_confined(sandboxes: SandboxFactory) -> None:
    code = "import os, random\nprint(os.listdir(), os.getpid(), random.random())\n_ = open('left', 'w')"
    outputs = set()
    for _ in range(5):
        sandbox = await sandboxes.open()
        outputs.add((await sandbox.run(code)).output)
        refused = (await sandbox.run("import socket\nsocket.socket(socket.AF_UNIX)")).error
        assert "PermissionError" in refused
        sandbox.close()
    assert outputs == {"[] 1 0.8444218515250481\n"}


async def test_other_limits_get_a_sandbox_of_their_own(sandboxes: SandboxFactory) -> None:
    for _ in range(2):
        (await sandboxes.open()).close()
    small = await sandboxes.open(SandboxLimits(memory=32 << 20, disk=1 << 20))
    ran = await small.run("import resource\nopen('f', 'wb').write(bytes(2 << 20))")
    assert "File too large" in ran.error or "No space" in ran.error
    small.close()


async def test_a_spare_whose_process_has_died_is_not_handed_out(sandboxes: SandboxFactory) -> None:
    for _ in range(2):
        (await sandboxes.open()).close()
    await count(sandboxes, 2)
    spares = processes(sandboxes)
    for each in spares:
        each.kill()
    async with asyncio.timeout(30):
        while any(each.is_running() for each in spares):
            await asyncio.sleep(0.01)
    sandbox = await sandboxes.open()
    assert (await sandbox.run("1 + 1")).output == "2\n"


async def test_spares_of_a_fork_server_that_has_died_are_not_handed_out(sandboxes: SandboxFactory) -> None:
    for _ in range(2):
        (await sandboxes.open()).close()
    server = sandboxes._fork_server.process
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    sandbox = await sandboxes.open()
    assert (await sandbox.run("1 + 1")).output == "2\n"
