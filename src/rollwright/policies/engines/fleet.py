"""The engines behind one policy: which are in service, and which weights they have.

What is true: a call is given to an engine only while it is in service, and an engine comes (back) into service
only when it answers and has the weights that the policy's version says. An engine that was restarted has its
first weights again; it is given the present ones before it gets a call. Whatever is asked of an engine while it
exchanges weights, nothing else exchanges weights meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollwright.errors import ConfigError
from rollwright.policies.base import EngineError, UpdateMode, Weights
from rollwright.policies.engines.counters import EngineCounters
from rollwright.policies.engines.dialect import Control, EngineDialect
from rollwright.policies.engines.router import Router
from rollwright.policies.http_calls import Fault, HttpCalls
from rollwright.policies.retry import FaultCause

FIRST_PAUSE = 0.2
"""Seconds between two looks at an engine that is out of service; doubled each time."""

SILENCE_SECONDS = 1.0
"""An engine that was restarted in between without anybody noticing was away for longer than that."""

LONGEST_PAUSE = 5.0
"""A model takes half a minute and more to load: looking more often gains nothing."""

_NO_ANSWER = object()


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
        self._heard = [0.0] * len(base_urls)
        """When each engine last gave a good answer, by the event loop's clock."""

    async def place(self, episode: str) -> int | Fault:
        """The engine for an episode's next call, when one is in service within the patience."""
        while (chosen := self.router.pick(episode)) is None or self._silent(chosen):
            if chosen is not None:
                self.suspect(chosen)
            elif (fault := await self._outage()) is not None:
                return fault
        return chosen

    def report(self, place: int, fault: Fault | None) -> None:
        """How a call went; an engine that fails is looked after until it is well."""
        if fault is None:
            self.router.succeeded(place)
            self._hear(place)
        elif self.router.failed(place, fault.cause):
            self._look_after(place)

    def suspect(self, place: int) -> None:
        """An engine may have other weights than it was given; it gets no call before that is known."""
        if place in self.router.serving:
            self.router.take_out(place)
            self._look_after(place)

    async def update(
        self, weights: Weights, mode: UpdateMode, paused: Callable[[int], Awaitable[None]]
    ) -> None:
        """Gives the weights to every engine in service; raises when not one of them has them afterwards.

        `paused` is called for each engine between its last old and its first new token. One whose last exchange
        failed is tried again; one that fails, and one that is out of service, gets the weights before it comes back.
        """
        if not self.router.serving and not self._unsure and (fault := await self._outage()) is not None:
            raise EngineError(fault.detail)
        async with self._exchange:
            asked = sorted({*self.router.serving, *self._unsure})
            failures = await asyncio.gather(*(self._give(place, weights, mode, paused) for place in asked))
            for place, failure in zip(asked, failures, strict=True):
                if failure is None:
                    self.weights = weights
                    self.router.bring_back(place)
                    self._back.set()
                else:
                    self.router.take_out(place)
                    self._look_after(place)
        if self.weights is not weights:
            raise EngineError(next((each for each in failures if each), "no engine is in service"))

    def _hear(self, place: int) -> None:
        self._heard[place] = asyncio.get_running_loop().time()

    def _silent(self, place: int) -> bool:
        """Whether an engine that was given weights may have been restarted since anybody heard of it."""
        if self.weights is None or self.router.loads()[place]:
            return False
        return asyncio.get_running_loop().time() - self._heard[place] > SILENCE_SECONDS

    async def _outage(self) -> Fault | None:
        """Waits until any engine is in service; the fault is that none came."""
        self._back.clear()
        try:
            async with asyncio.timeout(self._patience):
                await self._back.wait()
        except TimeoutError:
            reason = next(iter(self._unsure.values()), "none could be reached")
            return Fault(FaultCause.CONNECTION, f"no engine in service for {self._patience:g} s: {reason}")
        return None

    async def close(self) -> None:
        tasks = list(self._reviving.values())
        self._reviving.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give(
        self,
        place: int,
        weights: Weights,
        mode: UpdateMode,
        paused: Callable[[int], Awaitable[None]] | None = None,
    ) -> str | None:
        """Why an engine could not be given weights; `None`: it has them."""
        control = self.controls[place]
        try:
            await self._dialect.pause(control, mode)
            try:
                if paused is not None:
                    await paused(place)
                await self._dialect.load(control, weights)
            finally:
                await self._dialect.resume(control)
        except EngineError as error:
            self._unsure[place] = str(error)
            return str(error)
        self._unsure.pop(place, None)
        self._hear(place)
        return None

    def _look_after(self, place: int) -> None:
        task = self._reviving.get(place)
        if task is None or task.done():
            self._reviving[place] = asyncio.create_task(self._revive(place), name=f"engine {place}")

    async def _revive(self, place: int) -> None:
        pause = FIRST_PAUSE
        if not await self._well(place):
            self._counters.outages += 1
            while not await self._mended(place):
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._hear(place)
        self.router.bring_back(place)
        self._back.set()

    async def _well(self, place: int) -> bool:
        """Whether the engine answers and has the right weights."""
        control = self.controls[place]
        if place in self._unsure or await control.get_or("/health", _NO_ANSWER) is _NO_ANSWER:
            return False
        async with self._exchange:
            if self.weights is None:
                return True
            return await self._dialect.label(control) == str(self.weights.version)

    async def _mended(self, place: int) -> bool:
        """Whether it is well now, or is so after being given the weights."""
        if await self._well(place):
            return True
        if self.weights is None or await self.controls[place].get_or("/health", _NO_ANSWER) is _NO_ANSWER:
            return False
        async with self._exchange:
            return await self._give(place, self.weights, UpdateMode.RESTART_TURN) is None
