"""A simulated inference engine: slots, a queue, a speed, and completions of random lengths, without a model.

Always true:
- At most `slots` calls are served at a time, first come, first served. A call that ends by success, failure or cancellation
  gives its slot to the next one at once.
- The result of a call depends on its prompt's key alone (at temperature 0: on its content), never on the load. Only the
  version stamps depend on time.
- A weight update is a new version and takes no time. `drain` waits for the calls in service and admits no other;
  `abort_and_resume` changes the version in the middle of them; `restart_turn` restarts them and counts the lost tokens.
- It waits on asyncio's clock alone, so on a `VirtualClockLoop` hours of service take seconds.
- `lower_bound()` never exceeds the time that the work took: no scheduler could have been faster.

A completion is filler text followed by a player's answer; under an output format, and by a script, it is the answer alone. Ids and version stamps are exact. Log-probabilities are made up:
right in number and range, without a model behind them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollwright.engines.base import (
    Capabilities,
    EngineError,
    Generation,
    Prompt,
    RateLimited,
    Sampling,
    UpdateMode,
    Weights,
)
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.engines.settings import SimulatedPolicyConfig
from rollwright.errors import ConfigError
from rollwright.rng import draw_pair, generator
from rollwright.simulation.lengths import FixedLength, Lengths, LogNormalLength, filler_ids, filler_text
from rollwright.simulation.players import Player, SkilledPlayer, cut_to, draw_key
from rollwright.simulation.slots import Slots
from rollwright.trajectory import Floats, VersionRun, floats

_TABLE_DRAWS = generator("simulated log-probabilities")

_LOGPROBS = floats(-_TABLE_DRAWS.expovariate(2.0) for _ in range(4096))
"""Slices of one table serve as log-probabilities: a draw for each token would cost more than the rest of a call. The mean of
-0.5 is that of a fairly confident language model."""

_ROUNDING = 1e-9
"""Tokens: a token due at the exact moment of a version change belongs to the old version, despite rounding."""


class VersionChange(NamedTuple):
    """A version of the weights, and the time from which on it is in force."""

    time: float
    version: int


@dataclass(frozen=True)
class Usage:
    """Counters of an engine at one moment."""

    time: float
    """Time of the reading, by the event loop's clock."""
    busy_slot_seconds: float
    running: int
    queued: int
    requests: int
    """Calls received; those not in `completed`, `failed`, `refused` or `cancelled` are queued or running."""
    completed: int
    failed: int
    refused: int
    """Rejected because `max_queue` calls were waiting."""
    cancelled: int
    tokens: int
    """Tokens of completed calls."""
    restarted: int = 0
    """Calls restarted by a weight update; a call may count several times."""
    discarded_tokens: int = 0
    """Tokens lost by those restarts."""


class SimulatedEngine:
    """A simulated engine; see the module's docstring for its guarantees. Belongs to one event loop."""

    def __init__(
        self,
        *,
        slots: int = 8,
        tokens_per_second: float = 50.0,
        prefill_tokens_per_second: float | None = None,
        lengths: Lengths | None = None,
        player: Player | None = None,
        failure_rate: float = 0.0,
        hang_rate: float = 0.0,
        max_queue: int | None = None,
        retry_after: float = 1.0,
        track_episodes: bool = True,
        version: int = 0,
    ) -> None:
        """`tokens_per_second`: speed of each slot. `prefill_tokens_per_second`: unset, prompts take no time.

        A failing call raises an `EngineError` at some moment of its service time; a hanging one holds its slot until it is
        cancelled. Both are drawn again for each attempt at the rollout. `retry_after`: seconds that a refused caller is asked
        to wait. Without `track_episodes` no state is kept for episodes, and the lower bound considers single calls only.
        """
        _check_positive("tokens_per_second", tokens_per_second)
        if prefill_tokens_per_second is not None:
            _check_positive("prefill_tokens_per_second", prefill_tokens_per_second)
        if min(failure_rate, hang_rate) < 0 or failure_rate + hang_rate > 1:
            raise ConfigError(
                f"failure_rate {failure_rate}, hang_rate {hang_rate}: accepted are shares of 0 to 1 together"
            )
        self.slots = slots
        self.max_queue = max_queue
        self._slots = Slots(slots)
        self._speed = tokens_per_second
        self._prefill_speed = prefill_tokens_per_second
        self._lengths = lengths or FixedLength(64)
        self._player = player or SkilledPlayer(0.5)
        self._failure_rate = failure_rate
        self._hang_rate = hang_rate
        self._retry_after = retry_after
        self._bound = LowerBound(slots, track_episodes)
        self._versions = [VersionChange(float("-inf"), version)]
        self._restarts: list[float] = []
        """Times at which all calls in service were restarted."""
        self._updating = asyncio.Lock()
        self._start: float | None = None
        self._requests = self._completed = self._failed = self._refused = self._cancelled = self._tokens = 0
        self._restarted = self._discarded = 0

    @property
    def renderer(self) -> BytesRenderer:
        return self._player.renderer

    constrains_output = True

    @property
    def version(self) -> int:
        return self._versions[-1].version

    @property
    def pressure(self) -> int:
        return self._refused

    def set_version(self, version: int) -> None:
        """Stamp tokens with this version from now on, also in calls that are being served."""
        self._versions.append(VersionChange(asyncio.get_running_loop().time(), version))

    async def update_weights(self, weights: Weights, mode: UpdateMode) -> None:
        async with self._updating:
            if mode is UpdateMode.DRAIN:
                try:
                    await self._slots.drain()
                    self.set_version(weights.version)
                finally:
                    self._slots.resume()
                return
            self.set_version(weights.version)
            if mode is UpdateMode.RESTART_TURN:
                self._restarts.append(asyncio.get_running_loop().time())

    async def probe(self) -> Capabilities:
        return Capabilities("simulated", token_ids=True, logprobs=True, update_modes=tuple(UpdateMode))

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        loop = asyncio.get_running_loop()
        if self._start is None:
            self._start = loop.time()
        self._requests += 1
        self._refuse_overload()
        before = self._bound.path(prompt.episode)
        try:
            await self._slots.acquire()
            try:
                return await self._serve(loop, prompt, sampling, before)
            finally:
                self._slots.release()
        except asyncio.CancelledError:
            self._cancelled += 1
            raise
        except Exception:
            self._failed += 1
            raise

    async def close(self) -> None:
        """Nothing to release."""

    def usage(self) -> Usage:
        now = asyncio.get_running_loop().time()
        return Usage(
            time=now,
            busy_slot_seconds=self._slots.busy_seconds(now),
            running=self._slots.running,
            queued=self._slots.queued,
            requests=self._requests,
            completed=self._completed,
            failed=self._failed,
            refused=self._refused,
            cancelled=self._cancelled,
            tokens=self._tokens,
            restarted=self._restarted,
            discarded_tokens=self._discarded,
        )

    def occupancy(self, since: Usage | None = None) -> float:
        """Share of slot time in use since the reading `since`, or since the first request."""
        now = asyncio.get_running_loop().time()
        start = since.time if since else self._start
        if start is None or now <= start:
            return 0.0
        busy = self._slots.busy_seconds(now) - (since.busy_slot_seconds if since else 0.0)
        return busy / (self.slots * (now - start))

    def lower_bound(self) -> float:
        """Least seconds that the calls which were not cancelled need on these slots."""
        return self._bound.seconds

    def _refuse_overload(self) -> None:
        if self.max_queue is None or self._slots.running < self.slots:
            return
        if self._slots.queued >= self.max_queue:
            self._refused += 1
            raise RateLimited(
                f"the simulated engine has {self._slots.queued} calls waiting already", self._retry_after
            )

    async def _serve(
        self, loop: asyncio.AbstractEventLoop, prompt: Prompt, sampling: Sampling, before: float
    ) -> Generation:
        choice = self._player.choose(prompt, sampling)
        answer = choice.text
        answer_ids = self.renderer.encode(answer)
        drawn = draw_pair(*draw_key(prompt, sampling), "engine")
        filler = 0 if choice.whole else max(0, self._lengths.quantile(drawn.share) - len(answer_ids))
        tokens = min(filler + len(answer_ids), sampling.max_tokens)
        prompt_tokens = len(prompt.ids) if prompt.ids is not None else 0
        prefill = prompt_tokens / self._prefill_speed if self._prefill_speed else 0.0
        service = prefill + tokens / self._speed

        if self._failure_rate or self._hang_rate:
            await self._inject_fault(prompt, service, before)
        start, first, restarts = loop.time(), len(self._versions) - 1, len(self._restarts)
        await asyncio.sleep(service)
        # Restarts are applied after the fact: waiting for one in each call would cost every call, and most meet none.
        while restarts < len(self._restarts):
            moment = self._restarts[restarts]
            restarts += 1
            if moment < start + service:
                made = int((moment - start - prefill) * self._speed + _ROUNDING)
                self._restarted += 1
                self._discarded += min(tokens, max(0, made))
                start, first = moment, self._version_at(moment)
            if restarts == len(self._restarts):
                await asyncio.sleep(start + service - loop.time())

        text, ids, finish = cut_to(
            filler_text(filler) + answer, filler_ids(filler) + answer_ids, sampling.max_tokens
        )
        self._bound.add(prompt.episode, before, service)
        self._completed += 1
        self._tokens += tokens
        return Generation(
            text=text,
            sampled_ids=ids,
            logprobs=_logprobs(drawn.pick, tokens),
            versions=version_runs(self._versions[first:], start + prefill, self._speed, tokens),
            finish=finish,
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
            checked=True,  # right by construction
            entropy=choice.entropy if sampling.top_logprobs else None,
        )

    def _version_at(self, time: float) -> int:
        """Index of the version change in force at `time`."""
        return max(place for place, change in enumerate(self._versions) if change.time <= time)

    async def _inject_fault(self, prompt: Prompt, service: float, before: float) -> None:
        drawn = draw_pair(*prompt.key, "fault", prompt.attempt)
        if drawn.share >= self._hang_rate + self._failure_rate:
            return
        if drawn.share < self._hang_rate:
            await asyncio.get_running_loop().create_future()
        spent = service * (drawn.share - self._hang_rate) / self._failure_rate
        await asyncio.sleep(spent)
        self._bound.add(prompt.episode, before, spent)
        raise EngineError(f"the simulated engine failed, as failure_rate={self._failure_rate} says")


class LowerBound:
    """Least time of the work so far under any schedule: max(total work / slots, longest episode).

    The length of an episode is its longest path: sequential calls add up, concurrent ones do not.
    """

    def __init__(self, slots: int, track_episodes: bool = True) -> None:
        self._slots = slots
        self._track = track_episodes
        self._work = 0.0
        self._longest = 0.0
        self._paths: dict[str, float] = {}
        """Longest path of each episode so far."""

    @property
    def seconds(self) -> float:
        return max(self._work / self._slots, self._longest)

    def path(self, episode: str) -> float:
        """Seconds of service before a call that the episode makes now."""
        return self._paths.get(episode, 0.0)

    def add(self, episode: str, before: float, service: float) -> None:
        """Add a call that followed `before` seconds of its episode and took `service` seconds."""
        self._work += service
        path = before + service
        self._longest = max(self._longest, path)
        if self._track and path > self.path(episode):
            self._paths[episode] = path


def version_runs(
    changes: Sequence[VersionChange], start: float, speed: float, tokens: int
) -> tuple[VersionRun, ...]:
    """Version runs of `tokens` tokens that were sampled one by one at `speed` from `start` on.

    The first of `changes` was in force at the start; a token belongs to the version in force when it was finished.
    """
    runs: list[VersionRun] = []
    made = 0
    for place, change in enumerate(changes):
        end = tokens
        if place + 1 < len(changes):
            due = (changes[place + 1].time - start) * speed
            end = min(tokens, max(made, int(due + _ROUNDING)))
        if end > made:
            runs.append(VersionRun(change.version, end - made))
            made = end
    return tuple(runs)


def _logprobs(pick: int, length: int) -> Floats:
    start = pick % len(_LOGPROBS)
    end = start + length
    return (_LOGPROBS * (end // len(_LOGPROBS) + 1))[start:end]


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name}: {value} is not a speed; accepted: more than 0")


def make_simulated(settings: SimulatedPolicyConfig, player: Player | None = None) -> SimulatedEngine:
    """Build the engine of these settings. `player`: chooses the answers if there is no script; by default one of the settings'
    skill."""
    if settings.script is not None:
        from rollwright.simulation.script import read_script

        player = read_script(settings.script)
    return SimulatedEngine(
        slots=settings.slots,
        tokens_per_second=settings.tokens_per_second,
        lengths=LogNormalLength(settings.mean_tokens, settings.spread),
        player=player or SkilledPlayer(settings.skill),
        failure_rate=settings.failure_rate,
        hang_rate=settings.hang_rate,
        max_queue=settings.max_queue,
        track_episodes=False,
    )
