"""Ctrl-C and SIGTERM, for a whole process.

Always true, once `install` was called: the first signal asks whoever answers for the process at that moment to end it
cleanly; the second, or one that nobody answers, ends it at once. Either way there is no traceback, and the exit code is
128 plus the signal's number. Ending at once is safe: whatever must last is on the disk before anybody relies on it.

The handler is Python's and not the event loop's, so it acts also while code that is played keeps the loop busy.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

ANSWERED = (signal.SIGINT, signal.SIGTERM)

_SHOW_CURSOR = b"\x1b[?25h"
"""A live view hides it."""


class Interrupted(BaseException):
    """A signal has ended what was running, cleanly. Not a `KeyboardInterrupt`, which a command line parser swallows."""


class Interrupts:
    """What has come of a process's signals."""

    def __init__(self) -> None:
        self.installed = False
        self.received: int | None = None
        """The first signal that asked the process to end; `None`: none has."""
        self._answer: Callable[[], object] | None = None

    def install(self) -> None:
        """From now on; only in the main thread."""
        for each in ANSWERED:
            signal.signal(each, self._handle)
        self.installed = True

    @contextmanager
    def installed_meanwhile(self) -> Iterator[None]:
        """Inside, signals are handled so, where they are not yet and this is the main thread; as before, afterwards."""
        if self.installed or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.getsignal(each) for each in ANSWERED}
        self.install()
        try:
            yield
        finally:
            self.installed, self.received = False, None
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextmanager
    def answered_by(self, answer: Callable[[], object]) -> Iterator[None]:
        """Inside, the first signal calls `answer`, which must not take long and must not raise."""
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before if self.received is None else None

    @property
    def exit_code(self) -> int:
        """Of a process that ended because of a signal."""
        return 128 + (self.received or signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        answer, self._answer = self._answer, None
        if answer is None or self.received is not None:
            self.received = number
            self.leave()
        self.received = number
        answer()

    def leave(self) -> NoReturn:
        """Ends the process now, with one line."""
        word = b"terminated" if self.received == signal.SIGTERM else b"interrupted"
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
        with suppress(OSError):
            os.write(2, word + b"\n")
        os._exit(self.exit_code)


INTERRUPTS = Interrupts()
"""A process has one."""
