"""The servers behind one policy: which one gets a call, which are in service, and which weights they have.

Always true of the `Router`, which is pure: an episode's calls go to one server as long as it is in service, so that
they meet the same prefix cache; an episode without one gets the server with the least load; a server that is out of
service is never picked, and its episodes find another; memory is bounded, and the episodes not heard of for longest are
forgotten first. A server goes out of service at once when it cannot be reached, and after a few other failures in a
row; any answer that shows it alive begins the count anew.

Always true of the `EnginePool`: a server comes (back) into service only when it answers and has the weights that the
policy's version says. A server that was restarted has its first weights again; it is given the present ones before it
gets a call. No two exchanges of weights overlap.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rollwright.engines.base import EngineError, UpdateMode, Weights
from rollwright.engines.dialect import Control, EngineDialect
from rollwright.engines.http_calls import CallCounters, CallFault, HttpCalls
from rollwright.engines.partial import Piece
from rollwright.errors import ConfigError
from rollwright.http.retry import FaultCause
from rollwright.trajectory import FinishReason

FAILURES_IN_A_ROW = 3
"""One or two bad answers happen to a healthy engine under load; three in a row are worth asking after."""

REMEMBERED_EPISODES = 1 << 16
"""Far more than run at a time; a forgotten episode only loses its prefix cache."""

_TELLING = frozenset({FaultCause.TIMEOUT, FaultCause.SERVER_ERROR, FaultCause.BROKEN_BODY})
"""Failures that say something about the engine. A refusal is about the request, a 429 about load."""

FIRST_PAUSE = 0.2
"""Seconds between two looks at an engine that is out of service; doubled each time."""

SILENCE_SECONDS = 1.0
"""An engine that was restarted in between without anybody noticing was away for longer than that."""

LONGEST_PAUSE = 5.0
"""A model takes half a minute and more to load: looking more often gains nothing."""

GRACE_SECONDS = 5.0
"""An aborted call is answered within one step of the engine. One that is not was still on its way when the
engine paused: it made no token, and is sent again afterwards."""

_NO_ANSWER = object()


@dataclass
class EngineCounters(CallCounters):
    """Counters of an engine client, beside retries and failures by cause."""

    updates: int = 0
    resumed_calls: int = 0
    """Calls that an update cut short and that continued behind the tokens they had."""
    restarted_calls: int = 0
    """Calls that an update made begin anew."""
    discarded_tokens: int = 0
    """Sampled, then thrown away by `restart_turn`."""
    not_exact: int = 0
    """Completions without ids, or with log-probabilities of another distribution."""
    outages: int = 0
    """Times that an engine went out of service and did not answer, or had the wrong weights, when asked after."""


@dataclass(eq=False)
class Flight:
    """One request to one server, from its sending to its answer."""

    server: int
    version: int
    """Of the weights in force when it was sent."""
    task: asyncio.Task[bytes]
    update: UpdateMode | None = None
    """The update that began while it was under way, unless that lets it finish."""
    piece: Piece | None = None
    """The answer; `None`: the update cut the request off before it was answered."""

    @property
    def cut_by(self) -> UpdateMode | None:
        """The update that cut the answer short; `None`: it ended by itself."""
        ended = self.piece is not None and self.piece.finish is not FinishReason.ABORT
        return None if ended else self.update

    async def wait(self) -> bytes | None:
        """Returns the answer, or `None` where an update cut the request off; raises `CallFault`."""
        try:
            return await self.task
        except asyncio.CancelledError:
            # Either the update cancelled the request alone, or the caller is being cancelled, which must pass.
            caller = asyncio.current_task()
            if self.update is None or (caller is not None and caller.cancelling()):
                raise
            return None


@dataclass
class _Server:
    load: int = 0
    """Calls under way."""
    episodes: int = 0
    """Remembered ones that belong here."""
    failures: int = 0
    """In a row."""
    serving: bool = True


class Router:
    """Chooses among servers, which are numbers from 0; the pool carries its decisions out."""

    def __init__(self, servers: int, remembered: int = REMEMBERED_EPISODES) -> None:
        if servers < 1:
            raise ConfigError("base_urls: none given; accepted: one address or more")
        self._servers = [_Server() for _ in range(servers)]
        self._remembered = remembered
        self._homes: OrderedDict[str, int] = OrderedDict()
        self.moved = 0
        """Episodes that lost their server to a failure so far."""

    @property
    def serving(self) -> list[int]:
        return [server for server, each in enumerate(self._servers) if each.serving]

    def loads(self) -> list[int]:
        return [each.load for each in self._servers]

    def pick(self, episode: str) -> int | None:
        """Where the episode's next call goes; `None`: no server is in service."""
        home = self._homes.get(episode)
        if home is not None and self._servers[home].serving:
            self._homes.move_to_end(episode)
            return home
        candidates = self.serving
        if not candidates:
            return None
        chosen = min(
            candidates, key=lambda server: (self._servers[server].load, self._servers[server].episodes)
        )
        self.moved += home is not None
        self._settle(episode, chosen)
        return chosen

    def begin(self, server: int) -> None:
        self._servers[server].load += 1

    def end(self, server: int) -> None:
        self._servers[server].load -= 1

    def note_success(self, server: int) -> None:
        self._servers[server].failures = 0

    def note_failure(self, server: int, cause: FaultCause) -> bool:
        """Counts a failure; true when it takes the server out of service now."""
        found = self._servers[server]
        if cause is FaultCause.CONNECTION:
            found.failures = FAILURES_IN_A_ROW
        elif cause in _TELLING:
            found.failures += 1
        else:
            found.failures = 0
        if found.failures < FAILURES_IN_A_ROW or not found.serving:
            return False
        found.serving = False
        return True

    def take_out(self, server: int) -> None:
        self._servers[server].serving = False

    def bring_back(self, server: int) -> None:
        self._servers[server].serving = True
        self._servers[server].failures = 0

    def _settle(self, episode: str, server: int) -> None:
        former = self._homes.pop(episode, None)
        if former is not None:
            self._servers[former].episodes -= 1
        elif len(self._homes) >= self._remembered:
            _, forgotten = self._homes.popitem(last=False)
            self._servers[forgotten].episodes -= 1
        self._homes[episode] = server
        self._servers[server].episodes += 1


class EnginePool:
    def __init__(
        self,
        base_urls: Sequence[str],
        dialect: EngineDialect,
        calls: HttpCalls,
        counters: EngineCounters,
        patience: float,
    ) -> None:
        """`patience`: seconds that a call waits for any engine at all to be in service."""
        if len(set(base_urls)) != len(base_urls):
            raise ConfigError("base_urls: the same address is given twice")
        self.router = Router(len(base_urls))
        self.controls = [Control(calls, url) for url in base_urls]
        self.urls = [control.url(dialect.path) for control in self.controls]
        self.weights: Weights | None = None
        """The last that were given to the engines; `None`: those they were started with."""
        self._dialect = dialect
        self._counters = counters
        self._patience = patience
        self._exchange = asyncio.Lock()
        self._unsure: dict[int, str] = {}
        """Engines whose exchange of weights failed, and why; they may hold anything until one succeeds."""
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self._back = asyncio.Event()
        self._flights: set[Flight] = set()
        self._heard = [0.0] * len(base_urls)
        """When each engine last gave a good answer, by the event loop's clock."""

    async def pick_server(self, episode: str) -> int:
        """Picks the server for an episode's next call; raises `CallFault` if none is in service within the patience."""
        while (chosen := self.router.pick(episode)) is None or self._silent(chosen):
            if chosen is not None:
                self.suspect(chosen)
            else:
                await self._wait_for_service()
        return chosen

    def begin_flight(self, server: int, version: int, task: "asyncio.Task[bytes]") -> Flight:
        """Notes a request that was sent now, under weights of this version."""
        flight = Flight(server, version, task)
        self._flights.add(flight)
        self.router.begin(server)
        return flight

    def end_flight(self, flight: Flight) -> None:
        self._flights.discard(flight)
        self.router.end(flight.server)

    def report_success(self, server: int) -> None:
        self.router.note_success(server)
        self._hear(server)

    def report_failure(self, server: int, fault: CallFault) -> None:
        """Counts a failed call; a server that fails too often is revived before it gets another."""
        if self.router.note_failure(server, fault.cause):
            self._start_reviving(server)

    def suspect(self, server: int) -> None:
        """Takes a server out of service that may have other weights than it was given, until that is known."""
        if server in self.router.serving:
            self.router.take_out(server)
            self._start_reviving(server)

    async def update(self, weights: Weights, mode: UpdateMode) -> None:
        """Gives the weights to every server in service; raises when not one of them has them afterwards.

        Nothing new may be sent meanwhile. A server whose last exchange failed is tried again; one that fails, and one that
        is out of service, gets the weights before it comes back.
        """
        if mode is UpdateMode.DRAIN:
            await _wait_for(self._flights)
        for flight in self._flights:
            flight.update = mode
        if not self.router.serving and not self._unsure:
            try:
                await self._wait_for_service()
            except CallFault as fault:
                raise EngineError(fault.detail) from fault
        async with self._exchange:
            asked = sorted({*self.router.serving, *self._unsure})
            failures = await asyncio.gather(
                *(self._give_weights(server, weights, mode, settle=True) for server in asked)
            )
            for server, failure in zip(asked, failures, strict=True):
                if failure is None:
                    self.weights = weights
                    self.router.bring_back(server)
                    self._back.set()
                else:
                    self.router.take_out(server)
                    self._start_reviving(server)
        if self.weights is not weights:
            raise EngineError(next((each for each in failures if each), "no engine is in service"))

    def _hear(self, server: int) -> None:
        self._heard[server] = asyncio.get_running_loop().time()

    def _silent(self, server: int) -> bool:
        """Whether an engine that was given weights may have been restarted since anybody heard of it."""
        if self.weights is None or self.router.loads()[server]:
            return False
        return asyncio.get_running_loop().time() - self._heard[server] > SILENCE_SECONDS

    async def _wait_for_service(self) -> None:
        """Waits until any server is in service; raises `CallFault` when the patience is over."""
        self._back.clear()
        try:
            async with asyncio.timeout(self._patience):
                await self._back.wait()
        except TimeoutError:
            reason = next(iter(self._unsure.values()), "none could be reached")
            message = f"no engine in service for {self._patience:g} s: {reason}"
            raise CallFault(FaultCause.CONNECTION, message) from None

    async def close(self) -> None:
        tasks = list(self._reviving.values())
        self._reviving.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_weights(
        self, server: int, weights: Weights, mode: UpdateMode, *, settle: bool = False
    ) -> str | None:
        """Exchanges a server's weights; returns why that failed, or `None`."""
        control = self.controls[server]
        try:
            await self._dialect.pause(control, mode)
            try:
                if settle:
                    await self._settle_flights(server)
                await self._dialect.load(control, weights)
            finally:
                await self._dialect.resume(control)
        except EngineError as error:
            self._unsure[server] = str(error)
            return str(error)
        self._unsure.pop(server, None)
        self._hear(server)
        return None

    async def _settle_flights(self, server: int) -> None:
        """After a server has paused: waits for its aborted calls, and cuts off those that it did not know of yet."""
        flights = {flight for flight in self._flights if flight.server == server}
        await _wait_for(flights, GRACE_SECONDS)
        for flight in flights:
            flight.task.cancel()
        await _wait_for(flights)

    def _start_reviving(self, server: int) -> None:
        task = self._reviving.get(server)
        if task is None or task.done():
            self._reviving[server] = asyncio.create_task(self._revive(server), name=f"engine {server}")

    async def _revive(self, server: int) -> None:
        pause = FIRST_PAUSE
        if not await self._is_well(server):
            self._counters.outages += 1
            while not await self._mend(server):
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._hear(server)
        self.router.bring_back(server)
        self._back.set()

    async def _is_well(self, server: int) -> bool:
        """Whether the engine answers and has the right weights."""
        control = self.controls[server]
        if server in self._unsure or await control.get_or("/health", _NO_ANSWER) is _NO_ANSWER:
            return False
        async with self._exchange:
            if self.weights is None:
                return True
            return await self._dialect.label(control) == str(self.weights.version)

    async def _mend(self, server: int) -> bool:
        """Gives the server the present weights if it lacks them; returns whether it is well afterwards."""
        if await self._is_well(server):
            return True
        if self.weights is None or await self.controls[server].get_or("/health", _NO_ANSWER) is _NO_ANSWER:
            return False
        async with self._exchange:
            return await self._give_weights(server, self.weights, UpdateMode.RESTART_TURN) is None


async def _wait_for(flights: set[Flight], seconds: float | None = None) -> None:
    if tasks := {flight.task for flight in flights}:
        await asyncio.wait(tasks, timeout=seconds)
