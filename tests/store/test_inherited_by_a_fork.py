"""A store that a fork inherits refuses every call there, in one line; its maker goes on as before."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, inspect, os, sys
from rollwright.errors import RollwrightError
from rollwright.store.api import Store
from rollwright.store.errors import StoreError
from rollwright.store.opening import open_store

async def in_fork(store):
    answered = []
    for name, method in inspect.getmembers(Store, inspect.isfunction):
        if name.startswith("_") or name == "close":
            continue
        call = getattr(store, name)
        try:
            await asyncio.wait_for(call(*["ro-1"] * (len(inspect.signature(call).parameters) or 0)), 30)
            answered.append(name)
        except StoreError as error:
            assert "\\n" not in str(error) and "inherited by its fork" in str(error), str(error)
    await store.close()
    print("answered:", answered, flush=True)

def forked(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), flush=True)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

async def main(address):
    store = await open_store(address)
    await store.enqueue_rollout({"n": 1}, rollout_id="ro-1")
    await asyncio.to_thread(forked, lambda: asyncio.run(in_fork(store)))
    claimed = await store.dequeue_rollout("w")
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    print((await store.statistics())["succeeded"])
    await store.close()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_store_that_a_fork_inherits_refuses_every_call_there(tmp_path: Path, kind: str) -> None:
    address = "memory" if kind == "memory" else str(tmp_path / "store.db")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, address], capture_output=True, text=True, timeout=120
    )
    said = done.stdout.split("\n")[:-1]
    assert done.stderr == ""
    assert said[0] == "answered: []"
    assert said[1:] == ["1"], "its maker goes on"


IDS = """
import os
from rollwright.store.checks import new_id
new_id("x")
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, " ".join(new_id("x")[-16:] for _ in range(100)).encode())
    os._exit(0)
os.wait()
mine = {new_id("x")[-16:] for _ in range(100)}
print(len(mine & set(os.read(read, 10000).decode().split())), len(mine))
"""


def test_a_process_and_its_fork_make_different_ids() -> None:
    done = subprocess.run([sys.executable, "-c", IDS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 100\n", done.stderr
