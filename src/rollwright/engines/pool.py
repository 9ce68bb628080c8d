"""The servers behind one policy: routing of calls, health, and weights.

Always true of the `Router`, which is pure: its rule (`rollwright.engines.routing`) chooses among the servers in service; a server
out of service is never picked. A server goes out of service at once when it is unreachable, and after a few other failures in
a row; a successful response resets the count.

Always true of the `EnginePool`: a server comes into service only when it responds and has the weights of the policy's version.
A restarted server has its initial weights again, so it gets the current ones before it gets a call. Updates of one server never
overlap. No weights are loaded while a call is under way on a server: it was answered or cancelled before, so a response is of the
weights in force when its request was sent. A server that hangs in an update does not hold up the others for long.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rollwright.engines.base import EngineError, UpdateMode, Weights
from rollwright.engines.dialect import AdapterDialect, Control, EngineDialect
from rollwright.engines.http_calls import CallCounters, CallFault, HttpCalls, engine_error
from rollwright.engines.partial import Piece
from rollwright.engines.routing import RoutingRule, StickyRouting
from rollwright.errors import ConfigError
from rollwright.http.retry import FaultCause
from rollwright.trajectory import FinishReason, TokenIds

FAILURES_IN_A_ROW = 3
"""A healthy engine under load fails once or twice; after three failures in a row its health is checked."""

_HEALTH_CAUSES = frozenset({FaultCause.TIMEOUT, FaultCause.SERVER_ERROR, FaultCause.BROKEN_BODY})
"""Failures that concern the engine's health. A refusal concerns the request, a 429 the load."""

FIRST_PAUSE = 0.2
"""Seconds before the second health check of an engine out of service; doubled each time."""

SILENCE_SECONDS = 1.0
"""A restart takes longer than this, so an engine that was silent for less has the same weights."""

LONGEST_PAUSE = 5.0
"""Longest pause in seconds: loading a model takes half a minute or more, so checking more often gains nothing."""

GRACE_SECONDS = 5.0
"""An aborted call is answered within one step of the engine. A call without an answer by then was still in transit when the
engine paused: it has no token and is sent again afterwards."""

PAUSE_SECONDS = 30.0
"""A server that pauses answers within one step of the engine; one that has not by then hangs."""

STRAGGLER_SECONDS = 60.0
"""How much longer than twice the slowest of the other servers one may take to load weights. After that it is left behind for
now: it gets the weights before it comes back into service."""

_NO_ANSWER = object()


@dataclass
class EngineCounters(CallCounters):
    """Totals of an engine client, in addition to retries and failures by cause."""

    updates: int = 0
    resumed_calls: int = 0
    """Calls that an update cut short and that continued behind their tokens."""
    restarted_calls: int = 0
    """Calls that an update restarted."""
    discarded_tokens: int = 0
    """Tokens that `restart_turn` discarded."""
    not_exact: int = 0
    """Completions without ids, or with log-probabilities of another distribution."""
    adapters_kept: int = 0
    """Adapters of earlier versions that an engine did not unload."""
    outages: int = 0
    """Times that an engine out of service did not respond, or had the wrong weights, at the first health check."""


@dataclass(eq=False)
class Flight:
    """One request to one server, from sending it to its response."""

    server: int
    version: int
    """Version of the weights in force when it was sent."""
    task: asyncio.Task[bytes]
    update: UpdateMode | None = None
    """The update that started while it was under way, unless the update lets it finish."""
    piece: Piece | None = None
    """The response; `None`: the update cancelled the request before its response."""

    @property
    def cut_by(self) -> UpdateMode | None:
        """The update that cut the response short; `None`: it ended by itself."""
        ended = self.piece is not None and self.piece.finish is not FinishReason.ABORT
        return None if ended else self.update

    async def wait(self) -> bytes | None:
        """Wait for the response; `None`: an update cancelled the request. Raise `CallFault`."""
        try:
            return await self.task
        except asyncio.CancelledError:
            # Either the update cancelled the request alone, or the caller is being cancelled, which must propagate.
            caller = asyncio.current_task()
            if self.update is None or (caller is not None and caller.cancelling()):
                raise
            return None


@dataclass(frozen=True)
class _Failure:
    """Why a server did not take weights."""

    reason: str
    passing: bool
    """Whether another try may succeed; false: the server refused."""

    @classmethod
    def of(cls, error: EngineError) -> "_Failure":
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CallFault):
            cause = cause.__cause__
        return cls(str(error), cause is not None and cause.cause is not FaultCause.REFUSED)


@dataclass
class _Server:
    load: int = 0
    """Calls under way."""
    failures: int = 0
    """Failures in a row."""
    serving: bool = True


class Router:
    """Chooses among servers, numbered from 0; the pool carries out its decisions."""

    def __init__(self, servers: int, rule: RoutingRule | None = None) -> None:
        if servers < 1:
            raise ConfigError("base_urls: none given; accepted: one address or more")
        self._servers = [_Server() for _ in range(servers)]
        self._rule: RoutingRule = rule or StickyRouting()

    @property
    def moved(self) -> int:
        """Episodes that moved because their server failed."""
        return self._rule.moved

    @property
    def serving(self) -> list[int]:
        return [server for server, each in enumerate(self._servers) if each.serving]

    def loads(self) -> list[int]:
        return [each.load for each in self._servers]

    def pick(self, episode: str, ids: TokenIds | None = None) -> int | None:
        """The server of the episode's next call; `None`: no server is in service."""
        loads = {server: each.load for server, each in enumerate(self._servers) if each.serving}
        return self._rule.choose(episode, ids, loads) if loads else None

    def forget_caches(self, server: int | None = None) -> None:
        """The prefix caches of a server are gone, or those of all."""
        self._rule.forget_caches(server)

    def begin(self, server: int) -> None:
        self._servers[server].load += 1

    def end(self, server: int) -> None:
        self._servers[server].load -= 1

    def note_success(self, server: int) -> None:
        self._servers[server].failures = 0

    def note_failure(self, server: int, cause: FaultCause) -> bool:
        """Count a failure; true: the server goes out of service now."""
        found = self._servers[server]
        if cause is FaultCause.CONNECTION:
            found.failures = FAILURES_IN_A_ROW
        elif cause in _HEALTH_CAUSES:
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


class EnginePool:
    """The servers of one policy; see the module's docstring for its guarantees."""

    def __init__(
        self,
        base_urls: Sequence[str],
        dialect: EngineDialect,
        calls: HttpCalls,
        counters: EngineCounters,
        patience: float,
        rule: RoutingRule | None = None,
    ) -> None:
        """`patience`: seconds that a call waits for any server to come into service. `rule`: by which it is chosen; unset,
        an episode stays with one server."""
        if len(set(base_urls)) != len(base_urls):
            raise ConfigError("base_urls: the same address is given twice")
        self.router = Router(len(base_urls), rule)
        self.controls = [Control(calls, url) for url in base_urls]
        self.urls = [control.url(dialect.path) for control in self.controls]
        self.weights: Weights | None = None
        """The latest weights; `None`: those that the engines were started with."""
        self._dialect = dialect
        self._counters = counters
        self._patience = patience
        self._exchange = [asyncio.Lock() for _ in base_urls]
        """Of each server: its weights are loaded, or asked for, by one task at a time."""
        self._unsure: dict[int, str] = {}
        """Servers whose weight update failed, and why; their weights are unknown until one succeeds."""
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self._back = asyncio.Event()
        self._flights: set[Flight] = set()
        self._heard = [0.0] * len(base_urls)
        """Time of each server's last good response, by the event loop's clock."""

    async def pick_server(self, episode: str, ids: TokenIds | None = None) -> int:
        """Pick the server for an episode's next call; raise `CallFault` if none comes into service within the patience."""
        while (chosen := self.router.pick(episode, ids)) is None or self._silent(chosen):
            if chosen is not None:
                self.suspect(chosen)
            else:
                await self._wait_for_service()
        return chosen

    def begin_flight(self, server: int, version: int, task: "asyncio.Task[bytes]") -> Flight:
        """Register a request that is sent now, under weights of this version."""
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
        """Count a failed call; a server that fails too often must pass a health check before the next one."""
        if self.router.note_failure(server, fault.cause):
            self._start_reviving(server)

    def suspect(self, server: int) -> None:
        """Take a server out of service that may have other weights than it should, until it is checked."""
        if server in self.router.serving:
            self._take_out(server)

    async def update(self, weights: Weights, mode: UpdateMode) -> None:
        """Update the weights of every server in service; raise if none of them has the new weights afterwards.

        The caller must send no request meanwhile. A server whose last update failed is tried again; a server that fails or is
        out of service gets the weights before it comes back into service. If all fail, they are tried again until the patience
        is over, unless all refuse.
        """
        if weights.adapter is None:  # calls with an earlier adapter finish with theirs
            if mode is UpdateMode.DRAIN:
                await _wait_for(self._flights)
            for flight in self._flights:
                flight.update = mode
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience
        while True:
            if not self.router.serving and not self._unsure:
                try:
                    await self._wait_for_service()
                except CallFault as fault:
                    raise EngineError(fault.detail) from fault
            failures = await self._update_once(weights, mode)
            if self.weights is weights:
                return
            if clock() >= deadline or not any(each.passing for each in failures):
                raise EngineError(next((each.reason for each in failures), "no engine is in service"))
            await asyncio.sleep(FIRST_PAUSE)

    async def _update_once(self, weights: Weights, mode: UpdateMode) -> list[_Failure]:
        """Give the weights to all servers at once; returns the failures. Servers with the weights are in service then."""
        asked = sorted({*self.router.serving, *self._unsure})
        tasks = {asyncio.create_task(self._update_server(each, weights, mode)): each for each in asked}
        try:
            await _wait_for_most(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failures = []
        for task, server in tasks.items():
            failure = self._left_behind(server) if task.cancelled() else task.result()
            if failure is not None:
                failures.append(failure)
                self._take_out(server)
        if self.weights is weights:
            for server in set(self.router.serving) - set(asked):  # came back with the weights before
                self._unsure[server] = "came back during an update"
                self._take_out(server)
        return failures

    async def _update_server(self, server: int, weights: Weights, mode: UpdateMode) -> _Failure | None:
        async with self._exchange[server]:
            failure = await self._give_weights(server, weights, mode)
            if (
                failure is None
            ):  # before the lock is free: a repair that waits for it must not load the weights before
                self.weights = weights
                self.router.bring_back(server)
                self._back.set()
            return failure

    def _take_out(self, server: int) -> None:
        self.router.take_out(server)
        self._start_reviving(server)

    def _left_behind(self, server: int) -> _Failure:
        reason = (
            f"{self.controls[server].base_url}: took far longer than the other engines to load the weights"
        )
        self._unsure[server] = reason
        return _Failure(reason, passing=True)

    def _hear(self, server: int) -> None:
        self._heard[server] = asyncio.get_running_loop().time()

    def _silent(self, server: int) -> bool:
        """Whether a server with updated weights may have been restarted since its last response."""
        if self.weights is None or self.router.loads()[server]:
            return False
        return asyncio.get_running_loop().time() - self._heard[server] > SILENCE_SECONDS

    async def _wait_for_service(self) -> None:
        """Wait until any server is in service; raise `CallFault` when the patience is over."""
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

    async def _give_weights(self, server: int, weights: Weights, mode: UpdateMode) -> _Failure | None:
        """Update a server's weights; return the failure, or `None`. The caller holds the server's lock."""
        try:
            if weights.adapter is not None:
                await self._load_adapter(server, weights)
            else:
                await self._load_weights(server, weights, mode)
        except EngineError as error:
            self._unsure[server] = str(error)
            return _Failure.of(error)
        self._unsure.pop(server, None)
        self._hear(server)
        return None

    async def _load_weights(self, server: int, weights: Weights, mode: UpdateMode) -> None:
        control = self.controls[server]
        try:
            async with asyncio.timeout(PAUSE_SECONDS):
                await self._dialect.pause(control, mode)
        except TimeoutError:
            fault = CallFault(FaultCause.TIMEOUT, f"does not pause within {PAUSE_SECONDS:g} s")
            raise engine_error(fault, 1, control.base_url) from fault
        try:
            await self._settle_flights(server)
            await self._dialect.load(control, weights)
        finally:
            await self._dialect.resume(control)
        self.router.forget_caches(server)  # keys and values of other weights are of no use

    async def _load_adapter(self, server: int, weights: Weights) -> None:
        """Load an adapter beside the earlier ones; calls under way are not touched."""
        assert isinstance(self._dialect, AdapterDialect)
        assert weights.adapter is not None
        folder = str(weights.adapter.absolute())
        await self._dialect.load_adapter(self.controls[server], weights.adapter_name, folder)

    async def retire_adapter(self, weights: Weights) -> None:
        """Unload an adapter from every server when the calls that use it have ended."""
        assert isinstance(self._dialect, AdapterDialect)
        while of_it := {flight for flight in self._flights if flight.version <= weights.version}:
            await _wait_for(of_it)
            await asyncio.sleep(0)  # the flights are removed by their callers
        for control in self.controls:
            try:
                await self._dialect.unload_adapter(control, weights.adapter_name)
            except EngineError:  # a server that was restarted does not have it
                self._counters.adapters_kept += 1

    async def _has_weights(self, control: Control, weights: Weights) -> bool:
        if weights.adapter is None:
            return await self._dialect.label(control) == str(weights.version)
        assert isinstance(self._dialect, AdapterDialect)
        try:
            return await self._dialect.has_adapter(control, weights.adapter_name)
        except EngineError:
            return False

    async def _settle_flights(self, server: int) -> None:
        """After a server has paused: wait for its aborted calls, and cancel requests that had not reached it."""
        flights = {flight for flight in self._flights if flight.server == server}
        for flight in flights:
            if flight.update is None:  # sent before the server turned out to have other weights
                flight.update = UpdateMode.RESTART_TURN
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
        if not await self._is_healthy(server):
            self._counters.outages += 1
            self.router.forget_caches(server)
            while not await self._repair(server):
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._hear(server)
        self.router.bring_back(server)
        self._back.set()

    async def _is_healthy(self, server: int) -> bool:
        """Whether the server responds and has the right weights."""
        control = self.controls[server]
        if server in self._unsure or await control.get_or("/health", _NO_ANSWER) is _NO_ANSWER:
            return False
        async with self._exchange[server]:
            if self.weights is None:
                return True
            return await self._has_weights(control, self.weights)

    async def _repair(self, server: int) -> bool:
        """Give the server the current weights if it lacks them; return whether it is healthy afterwards. One that hangs keeps
        neither updates nor the checks of other servers waiting."""
        if await self._is_healthy(server):
            return True
        if self.weights is None or await self.controls[server].get_or("/health", _NO_ANSWER) is _NO_ANSWER:
            return False
        async with self._exchange[server]:
            if server in self.router.serving:  # an update has given it newer weights meanwhile
                return True
            given = self.weights
            failure = await self._give_weights(server, given, UpdateMode.RESTART_TURN)
        return failure is None and self.weights is given  # an update may have ended without it


async def _wait_for_most(tasks: Collection["asyncio.Task[_Failure | None]"]) -> None:
    """Wait for all tasks, but for none much longer than for the slowest of those that succeeded."""
    clock = asyncio.get_running_loop().time
    began, limit, waiting = clock(), None, set(tasks)
    while waiting:
        seconds = None if limit is None else began + limit - clock()
        done, waiting = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return
        if any(each.result() is None for each in done):
            limit = 2 * (clock() - began) + STRAGGLER_SECONDS


async def _wait_for(flights: set[Flight], seconds: float | None = None) -> None:
    if tasks := {flight.task for flight in flights}:
        await asyncio.wait(tasks, timeout=seconds)
