"""The episode that every arm of the overhead benchmark plays, and the ruler it is measured with.

True for all arms: the same four turns with the same texts, the same warm-up rule, one client process with
one event loop, CPU counted over all threads of that process from the end of the warm-up to the last
rollout's end. Imports nothing but the standard library, because a peer's own interpreter imports it too.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass

TURNS = 4

SYSTEM = (
    "You are a careful player of grid games. Think about the map before you move, keep your answer short, "
    "and always finish with the one action you choose, written between answer tags."
)
OPENING = (
    "You walk on a frozen lake from the start to the goal without falling into a hole. "
    "P is you, _ is ice, O is a hole, G is the goal. Actions: Left, Down, Right, Up.\n"
    "P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G\n"
    "You have 10 actions left. Answer like this: <answer>Right</answer>"
)
OBSERVATION = (
    "The map is now:\n_ P _ _\n_ O _ O\n_ _ _ O\nO _ _ G\n"
    "You have fewer actions left. Answer like this: <answer>Right</answer>"
)
MODEL = "simulated"

SOCKETS_PER_ROLLOUT = 3
"""At most: a peer that proxies its model calls holds both ends of one connection and a second one."""

SPARE_FILES = 512
"""Files and sockets a process holds beside those of its rollouts."""


@dataclass(frozen=True)
class Cell:
    """One arm at one concurrency, measured once."""

    concurrent: int
    rollouts: int
    failed: int
    """Rollouts that did not end with all turns played."""
    seconds: float
    cpu_seconds: float
    """User and system time of the client process."""
    p50: float
    """Median seconds of one rollout."""
    p99: float
    library: str
    """Name and version of what was measured."""

    @property
    def rollouts_per_second(self) -> float:
        return self.rollouts / self.seconds

    @property
    def cpu_ms_per_turn(self) -> float:
        return 1000 * self.cpu_seconds / (self.rollouts * TURNS)


@dataclass(frozen=True)
class Order:
    """What one client process is asked to do; it comes as the command line's four words."""

    url: str
    """The engine's base URL, with `/v1`."""
    concurrent: int
    rollouts: int
    warmup: int
    """Rollouts played before the clock starts: they open connections and fill caches."""

    @classmethod
    def from_command_line(cls) -> "Order":
        if len(sys.argv) != 5:
            raise SystemExit(f"usage: {sys.argv[0]} URL CONCURRENT ROLLOUTS WARMUP")
        url, *counts = sys.argv[1:]
        return cls(url, *map(int, counts))

    def words(self) -> list[str]:
        return [self.url, str(self.concurrent), str(self.rollouts), str(self.warmup)]


class Stopwatch:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    def cell(self, order: Order, durations: list[float], library: str) -> Cell:
        """Stops; `durations` holds the seconds of each rollout that ended well."""
        seconds = time.perf_counter() - self._wall
        cpu = time.process_time() - self._cpu
        ranked = sorted(durations) or [0.0]
        return Cell(
            concurrent=order.concurrent,
            rollouts=order.rollouts,
            failed=order.rollouts - len(durations),
            seconds=seconds,
            cpu_seconds=cpu,
            p50=ranked[len(ranked) // 2],
            p99=ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)],
            library=library,
        )


Play = Callable[[], Awaitable[bool]]
"""Plays one rollout; returns whether it ended with all turns played."""


async def closed_loop(play: Play, rollouts: int, concurrent: int) -> list[float]:
    """Plays `rollouts`, always `concurrent` at a time while they last; seconds of those that ended well."""
    durations: list[float] = []
    tickets: Iterator[int] = iter(range(rollouts))

    async def player() -> None:
        for _ in tickets:
            began = time.perf_counter()
            if await play():
                durations.append(time.perf_counter() - began)

    await asyncio.gather(*(player() for _ in range(min(concurrent, rollouts))))
    return durations


async def measure(play: Play, order: Order, library: str) -> Cell:
    """The whole protocol for an arm that can play one rollout on demand."""
    await closed_loop(play, order.warmup, order.concurrent)
    watch = Stopwatch()
    durations = await closed_loop(play, order.rollouts, order.concurrent)
    return watch.cell(order, durations, library)


def report(cell: Cell) -> None:
    """Hands the result to the benchmark, which reads the client's last line."""
    print(json.dumps(asdict(cell)))


def allow_open_files(concurrent: int) -> None:
    """Raises the soft limit on open files as far as this many rollouts need, or says why that cannot be."""
    needed = concurrent * SOCKETS_PER_ROLLOUT + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(
            f"{concurrent} concurrent rollouts need {needed} open files, the hard limit is {hard}: "
            f"raise it (ulimit -Hn {needed}) or ask for fewer"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
