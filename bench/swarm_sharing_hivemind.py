"""The peer's arm of `bench/swarm_sharing.py`, run by the interpreter that has hivemind.

    .venvs/hivemind/bin/python bench/swarm_sharing_hivemind.py node PLACE NODES ADDRESS
    .venvs/hivemind/bin/python bench/swarm_sharing_hivemind.py store BYTES

`node` takes part in all-gathers over one key of the DHT, as its first argument is told line by line. `store` puts one
value of that size through `hivemind.DHT`, and says when it is back.
"""

import asyncio
import json
import os
import sys
import time

GROUPS, GROUP_BYTES = 4, 25_000
EXPIRES_SECONDS = 600.0
POLL_SECONDS = 0.005
STORE_AGAIN_SECONDS = 1.0
"""Stores that meet at one key now and then push each other out; without this an all-gather can wait for ever."""


async def serve(place: int, nodes: int, address: str) -> None:
    from hivemind.dht.node import DHTNode

    loop = asyncio.get_running_loop()
    node = await DHTNode.create(initial_peers=[address] if address else [])
    reached = [str(each) for each in await node.get_visible_maddrs()]
    print(json.dumps({"address": reached[0]}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        number = int(line)
        if number == 0:
            await all_gather(node, place, nodes, number, b"here")
            print(json.dumps({"met": True}), flush=True)
            continue
        value = os.urandom(GROUPS * GROUP_BYTES)
        print(json.dumps({"prepared": number}), flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        began = time.perf_counter()
        received = await all_gather(node, place, nodes, number, value)
        print(json.dumps({"seconds": time.perf_counter() - began, "received": received}), flush=True)


async def all_gather(node, place: int, nodes: int, number: int, value: bytes) -> int:
    """Stores the own value and reads until everybody's is there; the bytes of the others', counted once."""
    key = f"round-{number}"
    stored = -STORE_AGAIN_SECONDS
    while True:
        if time.monotonic() - stored > STORE_AGAIN_SECONDS:
            stored = time.monotonic()
            await node.store(key, value, time.time() + EXPIRES_SECONDS, subkey=place)
        found = await node.get(key, latest=True)
        if found is not None and len(found.value) >= nodes:
            return sum(len(each.value) for who, each in found.value.items() if who != place)
        await asyncio.sleep(POLL_SECONDS)


def store(size: int) -> None:
    import hivemind

    dht = hivemind.DHT(start=True)
    print("up", flush=True)
    for number in range(3):
        dht.store(f"key-{number}", os.urandom(size), time.time() + EXPIRES_SECONDS)
    print("stored", flush=True)
    dht.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "store":
        store(int(sys.argv[2]))
    else:
        asyncio.run(serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
