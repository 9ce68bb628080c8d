"""A worker process for the crash tests: plays rollouts of a shared store until it is killed or told to stop.

Says on its standard output what the store has confirmed, one line each, so that the test knows what may not
be lost: `took <rollout> <attempt>`, `done <rollout> <attempt>`, `refused <rollout> <attempt>`.
"""

import asyncio
import os
import sys
from pathlib import Path

from rollwright.store import opening
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused
from rollwright.store.opening import TRAJECTORIES_VARIABLE
from rollwright.store.sql import SqlStore


async def open_store(address: str) -> Store:
    if place := os.environ.get(TRAJECTORIES_VARIABLE):
        return await opening.open_store(address, trajectories=place)
    if address.startswith("postgresql:"):
        from rollwright.store.sql.postgres import PostgresDriver

        url, _, schema = address.rpartition("#")
        return SqlStore(await PostgresDriver.open(url, schema))
    from rollwright.store.sql.sqlite import SqliteDriver

    return SqlStore(await SqliteDriver.open(Path(address)))


LONG = b"." * int(os.environ.get("LONG", "0"))
"""Behind each trajectory, for one that does not fit into a row."""


def say(*words: str) -> None:
    print(*words, flush=True)


async def play(store: Store, worker_id: str, pause: float) -> None:
    while claimed := await store.dequeue_rollout(worker_id, timeout=2.0):
        pair = (claimed.rollout_id, claimed.attempt.attempt_id)
        say("took", *pair)
        try:
            await store.append_journal(*pair, [f"turn of {pair[1]}".encode()])
            await asyncio.sleep(pause)
            await store.update_attempt(*pair, status="succeeded", trajectory=pair[1].encode() + LONG)
            say("done", *pair)
        except AttemptRefused:
            say("refused", *pair)


async def play_on(store: Store, worker_id: str, pause: float, patience: float = 2.0) -> None:
    """As a worker's slot plays: the next rollout is claimed with the end of the last."""
    while held := await store.dequeue_many_rollouts(1, worker_id, timeout=patience):
        while held:
            [claimed] = held
            pair = (claimed.rollout_id, claimed.attempt.attempt_id)
            say("took", *pair)
            try:
                await store.append_journal(*pair, [f"turn of {pair[1]}".encode()])
                await asyncio.sleep(pause)
                held = await store.finish_and_dequeue(
                    *pair, status="succeeded", worker_id=worker_id, trajectory=pair[1].encode()
                )
                say("done", *pair)
            except AttemptRefused:
                say("refused", *pair)
                held = []


async def main(address: str, name: str, how_many: str, pause: str) -> None:
    store = await open_store(address)
    say("ready")
    await asyncio.gather(*(play(store, f"{name}-{number}", float(pause)) for number in range(int(how_many))))
    await store.close()


async def main_on(address: str, name: str, how_many: str, pause: str, patience: str = "2") -> None:
    store = await open_store(address)
    say("ready")
    slots = (f"{name}-{number}" for number in range(int(how_many)))
    await asyncio.gather(*(play_on(store, slot, float(pause), float(patience)) for slot in slots))
    await store.close()


async def hold(address: str, name: str) -> None:
    """Claims one rollout, and tries to commit it when a line comes in."""
    store = await open_store(address)
    claimed = await store.dequeue_rollout(name, timeout=10.0)
    assert claimed is not None
    pair = (claimed.rollout_id, claimed.attempt.attempt_id)
    say("took", *pair)
    await asyncio.to_thread(sys.stdin.readline)
    try:
        await store.update_attempt(*pair, status="succeeded", trajectory=b"late")
        say("done", *pair)
    except AttemptRefused:
        say("refused", *pair)
    await store.close()


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    asyncio.run({"play": main, "play_on": main_on, "hold": hold}[mode](*arguments))
