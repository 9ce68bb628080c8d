"""Ctrl-C and SIGTERM: the first ends the process cleanly, the second at once.

A module of its own, because the command line imports it before anything else, and must not load asyncio.

Always true: after `Interrupts.install`, the first SIGINT or SIGTERM calls the current handler, which ends the process
cleanly; the second, or one without a handler, ends the process at once. There is no traceback, and the exit code is
128 plus the signal's number. Ending at once is safe because data that must last is on disk before anybody relies on
it.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_SHOW_CURSOR = b"\x1b[?25h"
"""Terminal sequence; a live view hides the cursor."""


class SignalReceived(BaseException):
    """A signal ended the program cleanly. Not a `KeyboardInterrupt`, because command line parsers swallow that."""


class Interrupts:
    """The signal handlers of this process. They are Python's, not the event loop's, so they also act while user code keeps
    the loop busy."""

    def __init__(self) -> None:
        self.installed = False
        self.received: int | None = None
        """The last signal received; `None`: no signal yet."""
        self._handler: Callable[[], object] | None = None

    def install(self) -> None:
        """Handle signals from now on; only in the main thread."""
        for each in HANDLED_SIGNALS:
            signal.signal(each, self._handle)
        self.installed = True

    @contextmanager
    def temporarily_installed(self) -> Iterator[None]:
        """Handle signals inside the block and restore the previous handlers afterwards. Does nothing if they are handled
        already or this is not the main thread."""
        if self.installed or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.getsignal(each) for each in HANDLED_SIGNALS}
        self.install()
        try:
            yield
        finally:
            self.installed, self.received = False, None
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextmanager
    def handled_by(self, handler: Callable[[], object]) -> Iterator[None]:
        """Inside the block the first signal calls `handler`, which must be quick and must not raise."""
        before, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = before if self.received is None else None

    @property
    def exit_code(self) -> int:
        """Exit code of a process that ended because of a signal."""
        return 128 + (self.received or signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handler, self._handler = self._handler, None
        if handler is None or self.received is not None:
            self.received = number
            self.exit_now()
        self.received = number
        handler()

    def exit_now(self) -> NoReturn:
        """End the process at once, with one line on stderr."""
        word = b"terminated" if self.received == signal.SIGTERM else b"interrupted"
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
        with suppress(OSError):
            os.write(2, word + b"\n")
        os._exit(self.exit_code)


INTERRUPTS = Interrupts()
"""The handlers of this process."""
