"""Code in a sandbox computes within its limits; attempts to reach anything outside are refused."""

import asyncio
import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollwright.errors import ConfigError
from rollwright.sandbox.client import Sandbox, SandboxError, SandboxFactory
from rollwright.sandbox.protocol import SandboxLimits

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="confinement needs Linux on x86-64 or ARM64",
)

LIMITS = SandboxLimits(seconds=5, cpu_seconds=20, memory=128 << 20, disk=4 << 20, threads=8)
SECRET = "ROLLWRIGHT_TEST_SECRET"


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[SandboxFactory]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "hunter2")
        made = SandboxFactory(LIMITS)
        yield made
        made.close()


@pytest.fixture
async def sandbox(sandboxes: SandboxFactory) -> AsyncIterator[Sandbox]:
    made = await sandboxes.open()
    yield made
    made.close()


async def output(sandbox: Sandbox, code: str) -> str:
    ran = await sandbox.run(textwrap.dedent(code))
    assert not ran.error, ran.error
    return ran.output


async def error(sandbox: Sandbox, code: str) -> str:
    ran = await sandbox.run(textwrap.dedent(code))
    assert ran.error, f"it worked: {ran.output}"
    return ran.error


async def test_names_live_on_and_the_last_value_is_shown(sandbox: Sandbox) -> None:
    assert await output(sandbox, "import math\nx = 20\nprint('hi')\nx + 1") == "hi\n21\n"
    assert await output(sandbox, "def double(n): return 2 * n\ndouble(x)") == "40\n"
    assert await output(sandbox, "x = None\nx") == ""


async def test_an_error_is_told_with_the_codes_own_lines_and_keeps_the_state(sandbox: Sandbox) -> None:
    told = await error(sandbox, "kept = 1\ndef f():\n    return 1 / 0\nf()")
    assert "ZeroDivisionError" in told
    assert "return 1 / 0" in told
    assert "rollwright" not in told
    assert "SyntaxError" in await error(sandbox, "1 +")
    assert await output(sandbox, "kept") == "1\n"


async def test_usual_programs_run(sandbox: Sandbox) -> None:
    code = """
    import asyncio, csv, decimal, json, re, sqlite3, statistics, tempfile, threading
    async def wait():
        await asyncio.sleep(0.001)
        return "waited"
    thread = threading.Thread(target=lambda: print("threaded"))
    thread.start(); thread.join()
    with open("notes.txt", "w") as file: file.write("kept")
    with tempfile.TemporaryFile("w+") as file: file.write("x")
    print(open("notes.txt").read(), asyncio.run(wait()))
    sqlite3.connect("data.db").execute("create table t (a)")
    """
    assert (await output(sandbox, code)).startswith("threaded\nkept waited\n")


async def test_the_same_code_gives_the_same_output_in_every_sandbox(sandboxes: SandboxFactory) -> None:
    code = "import random\nprint(random.random(), random.sample(range(100), 5), hash('a'), list({'x', 'y', 'z'}))"
    another = SandboxFactory(LIMITS)
    several = [*[await sandboxes.open() for _ in range(3)], await another.open()]
    assert len({await output(each, code) for each in several}) == 1
    for each in several:
        each.close()
    another.close()


async def test_sandboxes_share_nothing(sandboxes: SandboxFactory) -> None:
    first, second = await sandboxes.open(), await sandboxes.open()
    await output(first, "open('mine', 'w').write('1')\nmine = 1")
    assert await output(second, "import os\nos.listdir('.')") == "[]\n"
    assert "NameError" in await error(second, "mine")
    assert await output(second, "os.getpid(), os.getppid()") == "(1, 0)\n"
    first.close()
    second.close()


def spaces_of(pid: int) -> dict[str, str]:
    """The namespaces of a process, by kind."""
    return {
        kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "pid", "mnt", "ipc", "user") if pid
    }


async def test_live_sandboxes_have_no_namespace_in_common_with_each_other_or_with_this_process() -> None:
    sandboxes = SandboxFactory(LIMITS)
    for _ in range(2):  # the second time with namespaces that were prepared for the first
        opened = [await sandboxes.open() for _ in range(3)]
        assert sandboxes._fork_server.process is not None
        (spawner,) = direct_children(sandboxes._fork_server.process.pid)
        workers = direct_children(spawner)
        assert len(workers) == 3
        spaces = [spaces_of(pid) for pid in (*workers, os.getpid())]
        for kind in spaces[0]:
            assert len({each[kind] for each in spaces}) == 4, kind
        for each in opened:
            each.close()
        while direct_children(spawner):
            await asyncio.sleep(0.01)
    sandboxes.close()


async def test_what_one_sandbox_leaves_behind_the_next_one_does_not_find(sandboxes: SandboxFactory) -> None:
    for _ in range(3):
        sandbox = await sandboxes.open()
        code = """
        import os, random
        print(os.listdir("/tmp"), sorted(os.listdir("/proc")) if os.path.exists("/proc") else None, random.random())
        _ = open("left", "w").write("1")
        _ = open("/tmp/.hidden", "w").write("1")
        """
        assert await output(sandbox, code) == "[] None 0.8444218515250481\n"
        sandbox.close()


NETWORK = {
    "a connection": "import socket\nsocket.create_connection(('1.1.1.1', 53), 1)",
    "a connection to this machine": "import socket\nsocket.create_connection(('127.0.0.1', 80), 1)",
    "a unix socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "a name": "import socket\nsocket.getaddrinfo('example.com', 80)",
    "a page": "import urllib.request\nurllib.request.urlopen('http://example.com', timeout=1)",
}
PROCESSES = {
    "a fork": "import os\nos.fork()",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a command": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'])",
    "a shell": "import os\nassert os.system('true') == 0",
    "another program": "import os\nos.execv('/bin/sh', ['sh'])",
    "a process pool": "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "threads without end": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
}
FILES = {
    "users": "open('/etc/passwd')",
    "what only root may read": "open('/etc/shadow')",
    "processes": "open('/proc/1/environ')",
    "its parent's environment": "import os\nopen(f'/proc/{os.getppid()}/environ')",
    "every process": "import os\nos.listdir('/proc')",
    "the project": f"open({str(Path(__file__))!r})",
    "the package": f"open({str(Path(__file__).parents[2] / 'src' / 'rollwright' / '__init__.py')!r})",
    "the way back": "open('../../../../etc/passwd')",
    "devices": "open('/dev/sda', 'rb')",
    "the library, for writing": "import os\nopen(os.__file__, 'a')",
    "the root, for writing": "open('/new', 'w')",
}
SIGNALS = {
    "its parent": "import os\nos.kill(os.getppid(), 9)",
    "all": "import os\nos.kill(-1, 9)",
    "the process outside": f"import os\nos.kill({os.getpid()}, 9)",
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "another user": "import os\nos.setuid(0)",
    "another root": "import os\nos.chroot('/tmp')",
}


REFUSALS = (
    "PermissionError",
    "FileNotFoundError",
    "OSError",
    "gaierror",
    "URLError",
    "ValueError: not allowed to raise maximum limit",
    "RuntimeError: can't start new thread",
    "AssertionError",
)
ESCAPES = NETWORK | PROCESSES | FILES | SIGNALS


@pytest.mark.parametrize("code", ESCAPES.values(), ids=ESCAPES)
async def test_an_escape_is_refused(sandbox: Sandbox, code: str) -> None:
    await output(sandbox, "kept = 1")
    told = await error(sandbox, code)
    assert any(refusal in told for refusal in REFUSALS), told
    assert await output(sandbox, "kept") == "1\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")
async def test_calls_past_the_library_are_refused_too(sandbox: Sandbox) -> None:
    numbers = {
        "socket": 41,
        "connect": 42,
        "ptrace": 101,
        "mount": 165,
        "unshare": 272,
        "setns": 308,
        "process_vm_readv": 310,
        "bpf": 321,
        "userfaultfd": 323,
        "io_uring_setup": 425,
        "pidfd_open": 434,
        "prctl": 157,
        "seccomp": 317,
        "vfork": 58,
        "execveat": 322,
        "socket, by its other number": 0x4000_0000 + 41,
    }
    code = f"""
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    {{name: (libc.syscall(number, 0, 0, 0), ctypes.get_errno()) for name, number in {numbers}.items()}}
    """
    assert await output(sandbox, code) == f"{dict.fromkeys(numbers, (-1, 1))}\n"


async def test_the_user_is_not_root_and_has_no_capabilities(sandbox: Sandbox) -> None:
    user = int(await output(sandbox, "import os\nos.geteuid()"))
    assert user == (65534 if os.geteuid() == 0 else os.geteuid())


async def test_nothing_of_the_environment_gets_in(sandbox: Sandbox) -> None:
    assert await output(sandbox, "import os\ndict(os.environ)") == "{'HOME': '/tmp'}\n"
    assert os.environ[SECRET] == "hunter2"


async def test_a_memory_bomb_ends_at_its_limit(sandbox: Sandbox) -> None:
    assert "MemoryError" in await error(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert (
        await output(sandbox, "n = len(x)\ndel x\nn < 160") == "True\n"
    )  # plus the free memory of the interpreter


async def test_the_disk_cannot_be_filled(sandbox: Sandbox) -> None:
    one = "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 16))"
    assert "OSError" in await error(sandbox, one)
    many = "for at in range(10**6):\n    with open(f'f{at}', 'wb') as file: file.write(bytes(1 << 16))"
    assert "No space left" in await error(sandbox, many)
    empty = "import os\nfor at in range(10**6): os.mkdir(f'd{at}')"
    assert "No space left" in await error(sandbox, empty)


async def test_an_endless_loop_is_interrupted_and_the_state_kept(sandbox: Sandbox) -> None:
    await output(sandbox, "kept = 1")
    ran = await sandbox.run("while True: pass", seconds=0.2)
    assert (ran.is_late, ran.has_ended) == (True, False)
    assert "stopped after 0.2 s" in ran.error
    assert await output(sandbox, "kept") == "1\n"


async def test_code_that_will_not_stop_ends_with_its_sandbox(sandbox: Sandbox) -> None:
    code = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"
    ran = await sandbox.run(code, seconds=0.2)
    assert (ran.is_late, ran.has_ended) == (True, True)
    with pytest.raises(SandboxError, match="has ended"):
        await sandbox.run("1")


async def test_processor_time_is_limited_over_the_whole_life() -> None:
    sandboxes = SandboxFactory(SandboxLimits(seconds=20, cpu_seconds=1))
    sandbox = await sandboxes.open()
    ran = await sandbox.run("while True: pass")
    assert ran.has_ended
    assert "1 s of processor time" in ran.error
    sandboxes.close()


async def test_output_is_kept_up_to_its_limit_and_the_rest_counted(
    sandboxes: SandboxFactory, sandbox: Sandbox
) -> None:
    text = await output(sandbox, "print('x' * 10**6)")
    assert text.startswith("x" * LIMITS.output)
    assert text.endswith(f"[{10**6 + 1 - LIMITS.output} more characters]")


@pytest.mark.parametrize("junk", [b"\xff" * 100, b"\x00\x00\x00\x02ab"], ids=["endless", "unreadable"])
async def test_a_sandbox_that_talks_nonsense_is_ended(sandbox: Sandbox, junk: bytes) -> None:
    ran = await sandbox.run(f"import os\nos.write(3, {junk!r})")
    assert ran.has_ended


async def test_a_crash_of_the_interpreter_is_told(sandbox: Sandbox) -> None:
    ran = await sandbox.run("import ctypes\nctypes.string_at(0)")
    assert ran.has_ended
    assert "signal 11" in ran.error


async def test_giving_up_an_execution_ends_its_sandbox(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.run("while True: pass"))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sandbox.has_ended


async def test_closing_wakes_whoever_waits(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.run("while True: pass"))
    await asyncio.sleep(0.05)
    sandbox.close()
    assert (await asyncio.wait_for(running, 20)).has_ended


async def test_folders_can_be_shown_for_reading_and_importing(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "given.py").write_text("value = 7")
    sandboxes = SandboxFactory(LIMITS, folders=[shown])
    sandbox = await sandboxes.open()
    assert await output(sandbox, "import given\ngiven.value") == "7\n"
    assert "Read-only" in await error(sandbox, f"open({str(shown / 'new')!r}, 'w')")
    sandboxes.close()
    with pytest.raises(ConfigError, match="not a folder"):
        SandboxFactory(folders=[tmp_path / "none"])


def test_a_limit_that_allows_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="sandbox limits: seconds must be more than 0, got 0"):
        SandboxLimits(seconds=0)


async def test_a_fork_server_that_died_is_replaced(sandboxes: SandboxFactory) -> None:
    first = await sandboxes.open()
    process = sandboxes._fork_server.process
    assert process is not None
    process.kill()
    process.wait()
    while not (await first.run("1")).has_ended:
        await asyncio.sleep(0.01)
    second = await sandboxes.open()
    assert await output(second, "2") == "2\n"
    second.close()


def direct_children(pid: int) -> list[int]:
    """Children of a process, those that have exited left out."""
    found = subprocess.run(
        ["ps", "-o", "pid=,stat=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout.splitlines()
    return [int(each.split()[0]) for each in found if not each.split()[1].startswith("Z")]


def children(pid: int) -> set[int]:
    below = set(direct_children(pid))
    return below.union(*(children(each) for each in below))


def test_when_the_process_that_holds_sandboxes_is_killed_all_of_them_end() -> None:
    script = (
        "import asyncio\nfrom rollwright.sandbox.client import SandboxFactory\n"
        "async def main():\n    factory = SandboxFactory()\n    sandboxes = [await factory.open() for _ in range(3)]\n"
        "    runs = [asyncio.create_task(each.run('while True: pass', 1000)) for each in sandboxes]\n"
        "    await asyncio.sleep(0.1)\n    print('ready', flush=True)\n    await asyncio.gather(*runs)\nasyncio.run(main())"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    below = children(holder.pid)
    assert (
        len(below) == 2 + 3
    )  # the fork server, the first process of its namespaces, and one for each sandbox
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    deadline = time.monotonic() + 20
    while (left := [pid for pid in below if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


REFUSING = """
import asyncio, platform, struct
from rollwright.sandbox import isolation
from rollwright.sandbox.client import SandboxFactory, SandboxError
unshare = {"x86_64": 272, "aarch64": 97}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
isolation.install_seccomp_filter(b"".join(struct.pack("HBBI", *each) for each in steps))
async def main():
    try:
        await SandboxFactory().open()
    except SandboxError as error:
        print(error)
    sandboxes = SandboxFactory(allow_unconfined=True)
    sandbox = await sandboxes.open()
    print((await sandbox.run("import os, socket\\nprint(6 * 7)\\nsocket.socket()")).output.strip())
    sandboxes.close()
asyncio.run(main())
"""


def test_a_machine_that_cannot_confine_code_is_refused_in_one_line_unless_told_otherwise() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    refusal, result = done.stdout.splitlines()
    assert refusal == (
        "the Python sandbox cannot confine code on this machine; missing is namespaces: unshare: Operation not "
        "permitted; allow_unconfined=True would run it with limits only"
    )
    assert result == "42"
    assert "limits only" in done.stderr
