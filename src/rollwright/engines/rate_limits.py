"""Rate limits of a hosted API, kept by all processes of a machine together.

Always true: no request is sent before the buckets of requests and tokens have room for it, and none while the API has asked to
wait. The buckets fill by the minute, as the settings say or, without settings, as the API's headers tell. What the API tells
wins over the own count where it is less. The state is a small file that is locked while it is read and written, so worker
processes of one machine share it; on a system without such locks each process keeps its own.
"""

import asyncio
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from tempfile import gettempdir
from typing import Protocol

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MINUTE = 60.0

LONGEST_WAIT = 5.0
"""Seconds of one sleep: after it the file is read again, because another process may have learned more."""

_STATE = struct.Struct("<6d")
"""Requests and tokens of a minute (0: not known), what is left of each, the time of this state, the end of a pause."""

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
"""As OpenAI writes the time until a reset: `6m0s`, `1.5s`, `20ms`."""


class Headers(Protocol):
    """A response whose headers can be looked up."""

    def header(self, name: str) -> str | None: ...


class RateLimiter:
    """The limits of one API for one model and key."""

    def __init__(
        self,
        name: str,
        *,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        folder: Path | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`name`: the same in all processes that share the limits. `folder`: where its file is; by default a temporary one."""
        digest = blake2b(name.encode(), digest_size=12).hexdigest()
        user = getattr(os, "getuid", lambda: 0)()
        self._file = (folder or Path(gettempdir())) / f"rollwright-rates-{user}-{digest}"
        self._set = (requests_per_minute or 0.0, tokens_per_minute or 0.0)
        self._offsets: dict[asyncio.AbstractEventLoop, float] = {}
        self._clock = clock or self._shared_clock
        self._turn: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self.waited = 0.0
        """Seconds that requests of this process have waited."""

    async def acquire(self, tokens: int) -> None:
        """Wait until a request with so many tokens may be sent. Requests of one process are served in their order."""
        loop = asyncio.get_running_loop()
        async with self._turn.setdefault(loop, asyncio.Lock()):
            while (seconds := self.reserve(tokens)) > 0:
                pause = min(seconds, LONGEST_WAIT)
                self.waited += pause
                await asyncio.sleep(pause)

    def reserve(self, tokens: int) -> float:
        """Take a request and its tokens out of the buckets; returns 0, or the seconds to wait before the next try."""
        with self._state() as state:
            now = self._refill(state)
            if state[5] > now:
                return state[5] - now
            # A request larger than the whole bucket goes when the bucket is full, or it would never go.
            wanted = (1.0, min(float(tokens), state[1]) if state[1] else 0.0)
            waits = [
                (wanted[each] - state[2 + each]) / state[each] * MINUTE
                for each in (0, 1)
                if state[each] and state[2 + each] < wanted[each]
            ]
            if waits:
                return max(waits)
            state[2] -= 1.0
            state[3] -= tokens
        return 0.0

    def settle(self, reserved: int, used: int) -> None:
        """Give back the tokens that a request has not used, or take those beyond."""
        with self._state() as state:
            self._refill(state)
            state[3] += reserved - used

    def pause(self, seconds: float) -> None:
        """Let no request of any process go for so long: the API has said that it is too many."""
        with self._state() as state:
            now = self._refill(state)
            state[5] = max(state[5], now + seconds)

    def observe(self, response: Headers) -> None:
        """Adopt the limits that a response reports."""
        told = [_told(response, kind) for kind in ("requests", "tokens")]
        if all(limit is None and left is None for limit, left, _ in told):
            return
        with self._state() as state:
            now = self._refill(state)
            for each, (limit, left, reset) in enumerate(told):
                if limit is not None and limit > 0 and not self._set[each]:
                    if not state[each]:
                        state[2 + each] = limit if left is None else left
                    state[each] = limit
                if left is not None and state[each]:
                    state[2 + each] = min(state[2 + each], left)
                    if left <= 0 and reset is not None:
                        state[5] = max(state[5], now + min(reset, MINUTE))

    def _shared_clock(self) -> float:
        """The time of day, as all processes have it, which passes as the event loop's time does."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return time.time()
        return loop.time() + self._offsets.setdefault(loop, time.time() - loop.time())

    def _refill(self, state: list[float]) -> float:
        now = self._clock()
        passed = min(max(0.0, now - state[4]), MINUTE)
        for each in (0, 1):
            if state[each]:
                state[2 + each] = min(state[each], state[2 + each] + state[each] * passed / MINUTE)
        state[4] = now
        return now

    @contextmanager
    def _state(self) -> Iterator[list[float]]:
        """The state, locked; changes are written back."""
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX)
            data = os.pread(handle, _STATE.size, 0)
            if len(data) == _STATE.size:
                state = list(_STATE.unpack(data))
            else:
                state = [*self._set, *self._set, self._clock(), 0.0]
            for each in (0, 1):  # the settings win over what another process had
                if self._set[each] and state[each] != self._set[each]:
                    state[each] = self._set[each]
                    state[2 + each] = min(state[2 + each] or self._set[each], self._set[each])
            yield state
            os.pwrite(handle, _STATE.pack(*state), 0)
        finally:
            os.close(handle)


def _told(response: Headers, kind: str) -> tuple[float | None, float | None, float | None]:
    """Limit, what is left of it, and seconds until its reset, as OpenAI's and Anthropic's headers tell them."""
    found = []
    for part in ("limit", "remaining", "reset"):
        value = response.header(f"x-ratelimit-{part}-{kind}") or response.header(
            f"anthropic-ratelimit-{kind}-{part}"
        )
        found.append(seconds_of(value) if part == "reset" else _number(value))
    return found[0], found[1], found[2]


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:
        return None


def seconds_of(text: str | None) -> float | None:
    """Seconds of a duration such as `6m0s`, `20ms` or `1.5`; `None`: it is none."""
    if text is None or (plain := _number(text)) is not None:
        return None if text is None else plain
    found = _DURATION.fullmatch(text.strip())
    if found is None or not text.strip():
        return None
    hours, minutes, seconds, thousandths = (float(each or 0) for each in found.groups())
    return hours * 3600 + minutes * 60 + seconds + thousandths / 1000
