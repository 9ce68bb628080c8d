"""Concurrency of episodes: the limit in flight, and the controller that finds the engine's capacity.

`InflightLimit` is a semaphore whose limit can change while it is held. `ConcurrencyController` is a pure state machine:
it takes one observation after the other and returns a limit; it owns no task, clock or client. `ConcurrencyTuner` feeds
the controller with the load it observes and applies the limit.

The algorithm is hill climbing: more load is useful while throughput grows with it. The limit is raised in steps while each
step increases throughput enough. Afterwards the controller occasionally tries a step down or a step up, alternately: it
stays down if throughput does not fall, and up if it grows, so it follows the knee of the throughput curve and does not
drift with noise. A trial costs throughput, so trials without an effect become rarer. When the engine refuses load, the
limit is lowered at once. The controller learns only from windows in which the limit held episodes back.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rollwright.rollout.accounting import Activity

START = 16
"""Initial limit: about the capacity of an engine on a laptop, and a few steps below that of a large one."""

CLIMB = 2.0
"""Factor of a step of the first climb: doubling reaches any engine's capacity in a few windows."""

STEP = 1.5
"""Factor of a later step. Smaller ones find the knee more exactly, and need more windows for it."""

WORTHWHILE = 0.15
"""Share of a step that must come back as throughput, up, or may be lost, down. A queue in front of a full engine
gives nothing back; an engine whose batches still grow gives well over a half. At worst a step up of 1.5 is left
out that would have brought 7 %."""

BACK_OFF = 0.7
"""Factor of the limit after the engine refused load: low enough to drain its queue within a few calls."""

PATIENCE = 6
"""Full windows between trials, once the climb is over, and after each trial that changed something."""

MOST_PATIENCE = 48
"""Each trial that changes nothing doubles the windows before the next, up to these: a step down from the knee then costs
less than one in a hundred of the turns, and an engine that grows is still found out within minutes."""

HELD_BACK = 0.9
"""Share of the limit that must be in flight, on average, for the limit to be what holds episodes back."""

TURNS_FOR_A_WINDOW = 4
"""Turns for each episode in flight that make a window worth judging, because lengths vary a lot."""


@dataclass(frozen=True)
class LoadWindow:
    """Load since the last observation."""

    seconds: float
    turns: int
    tokens: int
    inflight: float
    """Episodes in flight, on average."""
    pressure: int = 0
    """Calls that were refused or not answered in time."""


@dataclass(frozen=True)
class _Trial:
    """A step that is not evaluated yet."""

    before: int
    throughput: float
    """Throughput at the previous limit."""


class ConcurrencyController:
    def __init__(self, maximum: int, start: int = START) -> None:
        self.limit = min(start, maximum)
        self._maximum = maximum
        self._trial: _Trial | None = None
        self._rest = 0
        """Full windows to wait before the next trial."""
        self._patience = PATIENCE
        """Full windows to wait after it."""
        self._climb_next = True
        """Whether the next trial is a step up."""
        self._factor = CLIMB

    def worth_judging(self, turns: int) -> bool:
        """Whether a window with this number of turns is long enough."""
        return turns >= TURNS_FOR_A_WINDOW * self.limit

    def observe(self, window: LoadWindow) -> int:
        """The limit to use from now on."""
        throughput = window.tokens / window.seconds
        if window.pressure:
            self._patience = PATIENCE
            self._settle(max(1, int(self.limit * BACK_OFF)))
        elif window.inflight < HELD_BACK * self.limit:
            pass
        elif self._trial is not None:
            self._judge(self._trial, throughput)
        elif self._rest > 0:
            self._rest -= 1
        else:
            self._step(throughput, up=self._climb_next)
        return self.limit

    def _judge(self, trial: _Trial, throughput: float) -> None:
        worth = trial.throughput * (1 + WORTHWHILE * (self.limit / trial.before - 1))
        if throughput < worth:
            self._settle(trial.before)
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            return
        self._patience = PATIENCE
        if self.limit > trial.before:
            self._step(throughput, up=True)
        else:
            self._settle(self.limit)

    def _step(self, throughput: float, *, up: bool) -> None:
        size = max(1, int(self.limit * (self._factor - 1)))
        after = min(self._maximum, self.limit + size) if up else max(1, int(self.limit / self._factor))
        if after == self.limit:
            self._settle(self.limit)
            return
        self._climb_next = not up
        self._trial = _Trial(self.limit, throughput)
        self.limit = after

    def _settle(self, limit: int) -> None:
        if limit == self._maximum:
            self._climb_next = False
        elif limit == 1:
            self._climb_next = True
        self.limit, self._trial, self._rest, self._factor = limit, None, self._patience, STEP


class InflightLimit:
    """A semaphore with a variable limit; lowering it does not evict current holders."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, value: int) -> None:
        self._limit = value
        self._let_in()

    async def __aenter__(self) -> None:
        if self._inside < self._limit and not self._waiting:
            self._inside += 1
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        self._let_in()  # those before it may all have been cancelled
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():  # let in and cancelled in the same moment
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def may_stay(self) -> bool:
        """Whether a holder may begin something new without leaving: nobody waits, and the limit has not been lowered."""
        return not self._waiting and self._inside <= self._limit

    def _leave(self) -> None:
        self._inside -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._inside < self._limit:
            ticket = self._waiting.popleft()
            if not ticket.done():  # a cancelled one is dropped here, where it costs nothing
                self._inside += 1
                ticket.set_result(None)


WATCH_SECONDS = 0.25
"""Seconds between two samples of the load."""


class ConcurrencyTuner:
    """Feeds the controller one window of load after the other, and applies its limit."""

    def __init__(
        self, limit: InflightLimit, activity: Activity, maximum: int, pressure: Callable[[], int]
    ) -> None:
        self._inflight = limit
        self._activity = activity
        self._controller = ConcurrencyController(maximum)
        self._pressure = pressure

    async def run(self) -> None:
        while True:
            self._inflight.limit = self._controller.limit
            self._controller.observe(await self._observe_window())

    async def _observe_window(self) -> LoadWindow:
        clock, activity = asyncio.get_running_loop().time, self._activity
        started, turns, tokens, pressure = clock(), activity.turns, activity.tokens, self._refusals()
        seen, looks = 0, 0
        while not self._controller.worth_judging(activity.turns - turns) and self._refusals() == pressure:
            await asyncio.sleep(WATCH_SECONDS)
            seen += activity.inflight
            looks += 1
        return LoadWindow(
            seconds=max(clock() - started, WATCH_SECONDS),
            turns=activity.turns - turns,
            tokens=activity.tokens - tokens,
            inflight=seen / max(looks, 1),
            pressure=self._refusals() - pressure,
        )

    def _refusals(self) -> int:
        """Number of calls so far that the engine refused or answered too late."""
        return self._activity.overdue + self._pressure()
