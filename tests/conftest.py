"""Property tests check promises, not the speed of a busy machine; in CI they draw the same examples every time.

Models compute with one thread here: tests run side by side, and each would take the whole machine. Processes that tests
interrupt hear Ctrl-C, also where a shell that put the tests in the background had it ignored.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("rollwright", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rollwright")

os.environ.setdefault("OMP_NUM_THREADS", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)


MOST_REFERENCES = 10
"""Reference calculations, of about 10 ms each on an idle core, for which one callback may keep an event loop."""


class LoopThread:
    """An event loop in a thread of its own, and the longest that one of its callbacks kept all others waiting.

    Counted in CPU time of that thread, so that other work of the machine does not show.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self.culprit = ""
        self._thread: int | None = None

    def forget(self) -> None:
        self.longest, self.culprit = 0.0, ""

    @staticmethod
    def most_seconds() -> float:
        """CPU seconds for which one callback may keep an event loop: as many as a fixed calculation takes here and now.

        A core that others use, too, needs more CPU time for the same work, so the slowest of a few measurements counts.
        """
        times = []
        for _ in range(5):
            began = time.thread_time()
            sum(number * number for number in range(400_000))
            times.append(time.thread_time() - began)
        return MOST_REFERENCES * max(times)

    def check(self, *what: object) -> None:
        """No callback has kept the loop for long."""
        assert self.longest < self.most_seconds(), (*what, self.culprit)

    @contextmanager
    def serving(self, make: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[Any]:
        """What `make` gives, entered in the thread for the length of the block."""
        ready = threading.Event()
        held: dict[str, Any] = {}

        async def main() -> None:
            self._thread = threading.get_ident()
            held.update(loop=asyncio.get_running_loop(), stop=asyncio.Event())
            async with make() as held["made"]:
                ready.set()
                await held["stop"].wait()

        def run() -> None:
            try:
                asyncio.run(main())
            finally:
                ready.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(60)
        try:
            yield held["made"]
        finally:
            held["loop"].call_soon_threadsafe(held["stop"].set)
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def loop_thread(monkeypatch: pytest.MonkeyPatch) -> LoopThread:
    made = LoopThread()
    plain = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        if threading.get_ident() != made._thread:
            plain(handle)
            return
        began = time.thread_time()
        plain(handle)
        took = time.thread_time() - began
        if took > made.longest:
            made.longest, made.culprit = took, repr(handle)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    return made
