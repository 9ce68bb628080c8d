"""Environments in foreign processes: isolated from each other, copied exactly, and gone at the end."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.foreign.connection import ForeignConnection, connect
from rollwright.envs.foreign.package import ForeignPackage
from rollwright.envs.foreign.venvs import make_venv, venv_folder
from rollwright.errors import ConfigError

ODD = ForeignPackage("json", Path(__file__).with_name("odd_program.py"), ())
"""`json` is in this interpreter, so no virtual environment is made."""


async def started(start: int = 0, seed: int = 1) -> ForeignConnection:
    connection = await connect(ODD, {"start": start})
    assert await connection.ask("reset", seed=seed) == start
    return connection


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")


async def test_what_a_package_prints_is_not_taken_for_an_answer() -> None:
    connection = await started(5)
    assert (await connection.ask("add", number=2))[0] == 7
    await connection.close()


async def test_a_copy_is_exact_and_independent() -> None:
    first = await started()
    await first.ask("add", number=1)
    twin = first.fork()
    here = [(await first.ask("add", number=10))[:2] for _ in range(3)]
    there = [(await twin.ask("add", number=10))[:2] for _ in range(3)]
    assert here == there  # the count and the draws of the package's global random state
    assert (await first.ask("add", number=0))[2] != (await twin.ask("add", number=0))[2]
    await first.close()
    assert (await twin.ask("add", number=1))[0] == 32
    await twin.close()


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ("crash", "its process ended: last words"),
        ("leave", "SystemExit: I leave"),
        ("break_off", "LookupError: no such thing"),
        ("unsayable", "TypeError: Object of type object is not JSON serializable"),
    ],
)
async def test_what_one_environment_does_is_one_line_and_the_others_go_on(operation: str, said: str) -> None:
    bad, good = await started(), await started()
    with pytest.raises(EnvironmentFailure) as caught:
        await bad.ask(operation)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (await good.ask("add", number=1))[0] == 1
    await bad.close()
    await good.close()


async def test_one_that_hangs_is_killed_when_nobody_waits_for_it_any_more() -> None:
    bad, good = await started(), await started()
    pid = (await bad.ask("add", number=0))[2]
    asking = asyncio.ensure_future(bad.ask("hang"))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await wait_until(lambda: is_gone(pid))
    assert (await good.ask("add", number=1))[0] == 1
    await bad.close()
    await good.close()


async def test_settings_that_the_package_refuses_are_the_users_mistake() -> None:
    with pytest.raises(ConfigError, match="json: start must be 0 or more"):
        ODD.describe({"start": -1})
    assert ODD.describe({"start": 4}) == {"start": 4}
    connection = await connect(ODD, {"start": -1})
    with pytest.raises(ConfigError, match="start must be 0 or more"):
        await connection.ask("reset", seed=0)
    await connection.close()


async def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package_at_all\n")
    package = ForeignPackage("json", broken, ())
    with pytest.raises(ConfigError, match="no_such_package_at_all"):
        package.describe({})
    with pytest.raises(EnvironmentFailure, match="no_such_package_at_all"):
        await connect(package, {})


async def test_processes_end_with_the_last_environment() -> None:
    connections = [await started() for _ in range(4)]
    pids = [(await each.ask("add", number=0))[2] for each in connections]
    server = connections[0]._server._process
    assert server is not None
    for each in connections:
        await each.close()
    await wait_until(lambda: all(map(is_gone, [*pids, server.pid])))


async def test_processes_end_when_the_process_that_uses_them_is_killed() -> None:
    program = f"""
import asyncio
from pathlib import Path
from rollwright.envs.foreign.connection import connect
from rollwright.envs.foreign.package import ForeignPackage

async def main():
    made = await connect(ForeignPackage("json", Path({str(ODD.program)!r}), ()), {{"start": 0}})
    await made.ask("reset", seed=1)
    print((await made.ask("add", number=0))[2], made._server._process.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    user = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert user.stdout is not None
    pids = [int(each) for each in (await user.stdout.readline()).split()]
    user.kill()
    await user.wait()
    await wait_until(lambda: all(map(is_gone, pids)))


def test_an_environment_that_was_not_finished_is_made_anew(tmp_path: Path) -> None:
    home = venv_folder(tmp_path, "nothing", ())
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").write_text("not a program")
    with pytest.raises(ConfigError, match=r"no-such-package-of-anybody==99|failed"):
        make_venv(home, ("no-such-package-of-anybody==99",))
    assert venv_folder(tmp_path, "nothing", ("a==1",)) != home
