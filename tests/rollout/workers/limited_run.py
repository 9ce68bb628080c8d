"""Run in a process of its own, under real limits: plays episodes that hold memory or file handles, and tells how it went.

`python limited_run.py memory|files`; prints JSON, and on standard error whatever the watch says.
"""

import asyncio
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from rollwright.config import build
from rollwright.envs.games.frozen_lake import FrozenLake
from rollwright.run.run import Run

EPISODES = 96
HELD_BYTES = 24 << 20
HELD_FILES = 4
WANTED = 80
"""At once: fewer than there are environments, which wait for their turn, too."""
ROOM = 40
"""Episodes that would fit into the memory, or whose files would: fewer than are wanted at once."""

most = 0


class Holding(FrozenLake):
    """Holds what it takes from its first step until its last."""

    held: Any = None
    there = 0

    async def reset(self, seed: int) -> Any:
        global most
        self.let_go()
        Holding.there += 1
        most = max(most, Holding.there)
        self.held = self.take()
        await asyncio.sleep(0.3)  # as long as a generation takes, so that episodes are there side by side
        return await super().reset(seed)

    async def step(self, answer: str) -> Any:
        step = await super().step(answer)
        if step.terminated or step.truncated:
            self.let_go()
        return step

    async def close(self) -> None:
        self.let_go()
        await super().close()

    def take(self) -> Any:
        if sys.argv[1] == "memory":
            return bytearray(HELD_BYTES)
        return [os.open(os.devnull, os.O_RDONLY) for _ in range(HELD_FILES)]

    def let_go(self) -> None:
        if self.held is None:
            return
        Holding.there -= 1
        held, self.held = self.held, None
        for each in held if isinstance(held, list) else ():
            os.close(each)


def limit() -> None:
    if sys.argv[1] == "memory":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most_bytes = taken + ROOM * HELD_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    else:
        most_files = len(os.listdir("/proc/self/fd")) + ROOM * HELD_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


async def main() -> None:
    config = build(
        {
            "policy": {"kind": "oracle"},
            "max_inflight": WANTED,
            "limits": {"max_attempts": 1},
            "custom_envs": {"Holding": {"env_type": f"{__name__}:Holding"}},
            "train_env_manager": {"num_env_groups": EPISODES // 4, "group_size": 4, "tags": ["Holding"]},
        }
    )
    limit()
    async with Run(config) as run:
        batch = await run.get_batch()
        failed = run.activity.total().causes.rows()
    print(json.dumps({"played": len(batch.trajectories), "failed": failed, "most": most}))


if __name__ == "__main__":
    sys.modules.setdefault("limited_run", sys.modules["__main__"])
    asyncio.run(main())
