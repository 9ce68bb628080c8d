"""A call's time, which stands still while the call waits in line for what others hold.

Otherwise a pool under load would look to the model like a tool that does not work, and to the profile like a slow one.
Always true: a call stands still as long as any part of it is in line; calls that ask for the same thing together are in
line together.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class NotesLines(Protocol):
    """Wants to know when a call is in line."""

    def in_line(self) -> AbstractContextManager[Any]:
        """The call is in line as long as it is inside."""
        ...


class CallTime:
    """The time of one call."""

    def __init__(self, noted: NotesLines | None = None) -> None:
        self.limit: asyncio.Timeout | None = None
        """Runs out; set once the call is made."""
        self._noted = noted
        self._line: AbstractContextManager[Any] | None = None
        self._left: float | None = None
        self._lines = 0

    def stop(self) -> None:
        """It is in line; once more where it is so already."""
        self._lines += 1
        if self._lines > 1:
            return
        if self._noted is not None:
            self._line = self._noted.in_line()
            self._line.__enter__()
        limit = self.limit
        if limit is not None and not limit.expired() and (until := limit.when()) is not None:
            self._left = until - asyncio.get_running_loop().time()
            limit.reschedule(None)

    def go_on(self) -> None:
        self._lines -= 1
        if self._lines:
            return
        if self._line is not None:
            self._line.__exit__(None, None, None)
            self._line = None
        if self.limit is not None and self._left is not None:
            self.limit.reschedule(asyncio.get_running_loop().time() + self._left)
            self._left = None


class Callers:
    """The calls that wait for one thing together."""

    def __init__(self) -> None:
        self._calls: list[CallTime | Callers] = []
        self._lines = 0
        self.count = 0
        """Also of those whose time nobody takes."""

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, the call that runs is one of them."""
        call = _running.get()
        self.count += 1
        if call is not None:
            self._calls.append(call)
            for _ in range(self._lines):
                call.stop()
        try:
            yield
        finally:
            self.count -= 1
            if call is not None:
                self._calls.remove(call)
                for _ in range(self._lines):
                    call.go_on()

    def context(self) -> Context:
        """For a task that acts for all of them."""
        context = copy_context()
        context.run(_running.set, self)
        return context

    def stop(self) -> None:
        self._lines += 1
        for call in self._calls:
            call.stop()

    def go_on(self) -> None:
        self._lines -= 1
        for call in self._calls:
            call.go_on()


_running: "ContextVar[CallTime | Callers | None]" = ContextVar("whose time runs", default=None)
"""`Callers`: in a task that acts for them."""


@contextmanager
def timed(call: CallTime) -> Iterator[None]:
    """Inside, `in_line` knows whose time runs."""
    token = _running.set(call)
    try:
        yield
    finally:
        with suppress(ValueError):  # the call was ended from outside its task, whose context is gone
            _running.reset(token)


@contextmanager
def limits_the_call(limit: asyncio.Timeout) -> Iterator[None]:
    """The limit stands still while the call is in line."""
    call = _running.get()
    if not isinstance(call, CallTime):
        call = CallTime()
    call.limit = limit
    try:
        with timed(call):
            yield
    finally:
        call.limit = None


@contextmanager
def in_line() -> Iterator[None]:
    """The time that passes inside does not count."""
    whose = _running.get()
    if whose is None:
        yield
        return
    whose.stop()
    try:
        yield
    finally:
        whose.go_on()
