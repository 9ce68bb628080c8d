"""Kernel memory is bounded too: RLIMIT_AS does not count buffers and locks."""

import platform
import sys
import textwrap

import pytest

from rollwright.sandbox.client import Sandbox

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="confinement needs Linux on x86-64 or ARM64",
)


async def printed(sandbox: Sandbox, code: str) -> str:
    ran = await sandbox.run(textwrap.dedent(code))
    assert not ran.error, ran.error
    return ran.output


ENOUGH = 32 << 20
"""Bytes: far below the sandbox's 256 MiB, and above the capacity of 64 buffers of the default size."""

SOCKETS = """
import socket
ends = []
try:
    while True:
        ends += socket.socketpair()
except OSError:
    pass
held = 0
for end in ends:
    end.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        try:
            end.setsockopt(socket.SOL_SOCKET, option, 1 << 24)
        except OSError:
            pass
    try:
        while held < 1 << 31:
            held += end.send(bytes(1 << 16))
    except OSError:
        pass
print(len(ends) > 10, held)
"""
PIPES = """
import fcntl, os
held, ends = 0, []
try:
    while True:
        ends.append(os.pipe())
except OSError:
    pass
for _, end in ends:
    os.set_blocking(end, False)
    try:
        fcntl.fcntl(end, 1031, 1 << 20)
    except OSError:
        pass
    try:
        while True:
            held += os.write(end, bytes(1 << 16))
    except OSError:
        pass
print(len(ends) > 10, held)
"""


@pytest.mark.parametrize("code", [SOCKETS, PIPES], ids=["sockets", "pipes"])
async def test_buffers_of_the_kernel_hold_little(plain_sandbox: Sandbox, code: str) -> None:
    opened, held = (await printed(plain_sandbox, code)).split()
    assert opened == "True"
    assert 0 < int(held) < ENOUGH


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")
async def test_calls_that_make_the_kernel_hold_memory_are_refused(plain_sandbox: Sandbox) -> None:
    numbers = {
        "setsockopt": 54,
        "sendmsg": 46,
        "sendmmsg": 307,
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "mq_open": 240,
        "add_key": 248,
        "keyctl": 250,
        "inotify_init1": 294,
        "fanotify_init": 300,
        "timerfd_create": 283,
        "timer_create": 222,
        "signalfd4": 289,
        "memfd_create": 319,
        "memfd_secret": 447,
        "io_uring_setup": 425,
        "io_setup": 206,
        "userfaultfd": 323,
        "perf_event_open": 298,
        "bpf": 321,
        "vmsplice": 278,
        "splice": 275,
        "tee": 276,
        "setxattr": 188,
        "mlock": 149,
    }
    code = f"""
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    {{name: (libc.syscall(number, 0, 0, 0), ctypes.get_errno()) for name, number in {numbers}.items()}}
    """
    assert await printed(plain_sandbox, code) == f"{dict.fromkeys(numbers, (-1, 1))}\n"


async def test_only_pairs_of_local_sockets_are_given(plain_sandbox: Sandbox) -> None:
    ran = await plain_sandbox.run("import socket\nsocket.socketpair(socket.AF_INET)")
    assert "PermissionError" in ran.error


async def test_locks_seem_to_work_and_take_nothing(plain_sandbox: Sandbox) -> None:
    code = """
    import fcntl, sqlite3, struct
    file = open("locked", "w+b")
    for at in range(20_000):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * at)
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
    base = sqlite3.connect("data.db")
    base.execute("create table t (a)")
    base.execute("insert into t values (7)")
    base.commit()
    print(base.execute("select a from t").fetchone())
    """
    assert await printed(plain_sandbox, code) == "(7,)\n"
    ran = await plain_sandbox.run("fcntl.fcntl(file, 37, asked)")  # a lock of the open file
    assert "PermissionError" in ran.error


async def test_event_loops_work(plain_sandbox: Sandbox) -> None:
    code = """
    import asyncio
    async def main():
        queue = asyncio.Queue()
        async def put():
            for number in range(3):
                await asyncio.sleep(0)
                await queue.put(number)
        async with asyncio.TaskGroup() as group:
            group.create_task(put())
            return [await queue.get() for _ in range(3)], await asyncio.to_thread(sum, [1, 2])
    for _ in range(20):
        found = asyncio.run(main())
    print(found)
    """
    assert await printed(plain_sandbox, code) == "([0, 1, 2], 3)\n"
