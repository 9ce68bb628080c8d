"""A fleet of simulated vLLM servers with prefix caches, for comparing routing rules on a virtual clock.

Always true: the router and its rules are those of `rollwright.engines`; all rules play the same episodes with the same lengths; the
same arguments give the same figures on every machine. A call takes the time of the prompt tokens that its server has not
cached, and of its completion; calls of a server do not slow each other down, and weights never change.
"""

import asyncio
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from rollwright.aio import VirtualClockLoop
from rollwright.engines.pool import Router
from rollwright.engines.routing import RoutingRule
from rollwright.engines.settings import ROUTING
from rollwright.http.retry import FaultCause
from rollwright.rng import generator
from rollwright.trajectory import token_ids

PLACES = 16
"""Calls that a server serves at once."""
CACHE_TOKENS, CACHE_BLOCK = 160_000, 16
"""Tokens of a server's cache, and of one of its blocks, as in vLLM."""
PREFILL, DECODE = 2_000.0, 50.0
"""Tokens for each second and place: of a prompt, and of a completion."""
TURNS = (3, 6)
SYSTEM_TOKENS, TASK_TOKENS = 512, (1_024, 6_144)
"""Tokens that all prompts share, and that the members of a group share behind them."""
REPLY_TOKENS, OBSERVED_TOKENS = 120.0, (50, 400)
INFLIGHT = 0.8
"""Episodes at once for each place: a fleet that is full to the last place leaves a rule no choice."""
DEAD_FROM, DEAD_SECONDS = (0.1, 0.7), 40.0
"""When servers die, as shares of the bound of the makespan, and for how long."""


@dataclass(frozen=True)
class PlannedEpisode:
    """One episode: tokens of its first prompt, and for each turn the tokens of its reply and of what is observed then."""

    name: str
    first: "array[int]"
    turns: tuple[tuple[int, int], ...]

    def prompts(self) -> "list[tuple[array[int], int]]":
        """The prompt of each call, and the length of its reply. Tokens of its own are numbered so that nobody shares them."""
        ids, found, own = (
            array(self.first.typecode, self.first),
            [],
            generator("own", self.name).getrandbits(30),
        )
        for reply, observed in self.turns:
            found.append((array(ids.typecode, ids), reply))
            ids.extend([own] * (reply + observed))
        return found


def plan_episodes(groups: int, members: int) -> list[PlannedEpisode]:
    """The members of a group stand together, as a scheduler opens them."""
    episodes = []
    for group in range(groups):
        draws = generator("fleets", group)
        task = [1_000_000 + group] * draws.randint(*TASK_TOKENS)
        first = token_ids([7] * SYSTEM_TOKENS + task)
        for member in range(members):
            draws = generator("fleets", group, member)
            turns = tuple(
                (
                    max(1, round(draws.lognormvariate(0.0, 0.6) * REPLY_TOKENS)),
                    draws.randint(*OBSERVED_TOKENS),
                )
                for _ in range(draws.randint(*TURNS))
            )
            episodes.append(PlannedEpisode(f"g{group}-m{member}", first, turns))
    return episodes


class ServerDied(Exception):
    """The server of a call has died."""


@dataclass(eq=False)
class FleetServer:
    """A simulated vLLM server: places, a prefix cache in blocks, and a time for each call."""

    places: asyncio.Semaphore
    cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    alive: bool = True
    calls: "dict[asyncio.Task[Any], None]" = field(default_factory=dict)
    """In the order in which they came, in which they end if the server dies: that of a set would differ between processes."""

    def cached(self, blocks: list[int]) -> int:
        """Tokens of the prompt that are cached; everything in it is cached afterwards."""
        hit = 0
        while hit < len(blocks) and blocks[hit] in self.cache:
            hit += 1
        for block in reversed(blocks):  # so that the end of a prompt is dropped before its beginning
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_TOKENS // CACHE_BLOCK:
            self.cache.popitem(last=False)
        return hit * CACHE_BLOCK

    def die(self) -> None:
        self.alive = False
        self.cache.clear()
        for task in list(self.calls):
            task.cancel()


def blocks_of(ids: "array[int]") -> list[int]:
    """Numbers of the whole blocks of a prompt, each depending on all before it."""
    found, seed = [], 0
    for start in range(0, len(ids) - CACHE_BLOCK + 1, CACHE_BLOCK):
        seed = hash((seed, ids[start], ids[start + CACHE_BLOCK - 1]))
        found.append(seed)
    return found


@dataclass
class SimulatedFleet:
    """All servers, the router, and what was counted."""

    router: Router
    servers: list[FleetServer]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sent_again: int = 0

    async def play(self, episode: PlannedEpisode) -> None:
        for ids, reply in episode.prompts():
            blocks = blocks_of(ids)
            while not await self._call(episode.name, ids, blocks, reply):
                self.sent_again += 1

    async def _call(self, name: str, ids: "array[int]", blocks: list[int], reply: int) -> bool:
        """Whether the call was answered; if not, its server is out of service."""
        number = self.router.pick(name, ids)
        assert number is not None
        server = self.servers[number]
        self.router.begin(number)
        task = asyncio.ensure_future(self._serve(server, ids, blocks, reply))
        server.calls[task] = None
        try:
            await asyncio.wait({task})
        finally:
            self.router.end(number)
            server.calls.pop(task, None)
        if task.cancelled() or task.exception() is not None:
            if self.router.note_failure(number, FaultCause.CONNECTION):
                self.router.forget_caches(number)
            return False
        self.router.note_success(number)
        return True

    async def _serve(self, server: FleetServer, ids: "array[int]", blocks: list[int], reply: int) -> None:
        async with server.places:
            if not server.alive:
                raise ServerDied
            cached = server.cached(blocks)
            self.prompt_tokens += len(ids)
            self.cached_tokens += cached
            await asyncio.sleep((len(ids) - cached) / PREFILL + reply / DECODE)

    async def break_down(self, number: int, after: float) -> None:
        await asyncio.sleep(after)
        self.servers[number].die()
        await asyncio.sleep(DEAD_SECONDS)
        self.servers[number].alive = True
        self.router.bring_back(number)


def fleet_bounds(episodes: list[PlannedEpisode], at_once: int) -> tuple[float, float]:
    """Highest hit rate and shortest makespan that any rule could reach."""
    seen: set[int] = set()
    tokens = hits = 0
    work = longest = 0.0
    for episode in episodes:
        own = 0.0
        for ids, reply in episode.prompts():
            blocks = blocks_of(ids)
            hit = CACHE_BLOCK * sum(block in seen for block in blocks)
            seen.update(blocks)
            tokens, hits = tokens + len(ids), hits + hit
            work += (len(ids) - hit) / PREFILL + reply / DECODE
            own += reply / DECODE
        longest = max(longest, own)
    return hits / tokens, max(work / at_once, longest)


async def measure(
    rule: RoutingRule, episodes: list[PlannedEpisode], servers: int, failures: float
) -> dict[str, Any]:
    fleet = SimulatedFleet(
        Router(servers, rule), [FleetServer(asyncio.Semaphore(PLACES)) for _ in range(servers)]
    )
    at_once = round(INFLIGHT * servers * PLACES)
    hit_bound, bound = fleet_bounds(episodes, at_once)
    draws = generator("failures", servers)
    dying = draws.sample(range(servers), round(failures * servers))
    broken = [
        asyncio.create_task(fleet.break_down(each, bound * draws.uniform(*DEAD_FROM)))
        for each in sorted(dying)
    ]
    waiting = list(reversed(episodes))

    async def slot() -> None:
        while waiting:
            await fleet.play(waiting.pop())

    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(slot() for _ in range(at_once)))
    makespan = loop.time() - began
    for each in broken:
        each.cancel()
    await asyncio.gather(*broken, return_exceptions=True)
    return {
        "hit_rate": fleet.cached_tokens / fleet.prompt_tokens,
        "hit_rate_bound": hit_bound,
        "makespan": makespan,
        "makespan_bound": bound,
        "sent_again": fleet.sent_again,
        "deaths": len(dying),
    }


def simulate_fleet(
    name: str, episodes: list[PlannedEpisode], servers: int, failures: float
) -> dict[str, Any]:
    """Figures of the routing rule `name`, while this share of the servers dies and comes back."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(measure(ROUTING.make(name), episodes, servers, failures))
