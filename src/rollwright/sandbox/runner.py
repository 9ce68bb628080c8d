"""Runs code, inside a sandbox. What is here runs next to hostile code and is trusted by nobody outside.

Whatever code prints, raises or leaves behind (halves of characters, errors that cannot be shown, another output, tracers,
handlers, limits) ends at most its own execution, with a message. Code that breaks the interpreter itself ends its
sandbox, which says so.

Names live from one execution to the next, as at an interactive prompt; the value of a last expression is shown. A time
limit interrupts the code and keeps the state. Random numbers begin the same in every sandbox, so that the same code
gives the same output when an episode is played again.
"""

import ast
import builtins
import importlib
import io
import linecache
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from rollwright.sandbox.protocol import Ran, Run, SandboxLimits, read_frame, write_frame

_REPEAT_SECONDS = 0.1
"""Code that catches the interruption is interrupted again after this."""

_WARM = [
    "bisect",
    "collections",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "typing",
    "dataclasses",
    "encodings.idna",
]
"""What code imports most; every sandbox has these in memory from the start."""

_MAX_TRIES = 5
"""Of taking back what code has set: a tracer and a profiler that raise are gone after they have, each."""

_BESIDE_OUTPUT = 100
"""Characters for saying how much was left out."""

_FILE = "<code {}>"


class TimeIsUp(BaseException):
    """Raised in the code when its time is up; not an `Exception`, so that code seldom catches it."""


class _Output(io.TextIOBase):
    """Keeps the first characters and counts the others."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._parts: list[str] = []
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        plain = _sendable("".join((text,)))  # of a subclass of `str` too, whose own methods may do anything
        kept = plain[: self._room]
        self._room -= len(kept)
        self._parts.append(kept)
        self._dropped += len(plain) - len(kept)
        return str.__len__(text)

    def text(self) -> str:
        cut = f"\n[{self._dropped} more characters]" if self._dropped else ""
        return "".join(self._parts) + cut


class CodeRunner:
    """Executes one piece of code after the other."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self._count = 0
        self._may_interrupt = False
        self._recursion = sys.getrecursionlimit()

    def run(self, request: Run) -> Ran:
        self._count += 1
        output = _Output(self._output)
        sys.stdout = sys.stderr = output
        error, is_late = "", False
        try:
            error = self._outcome(request, output)
        except TimeIsUp:
            error, is_late = f"TimeoutError: stopped after {request.seconds:g} s", True
        except BaseException:  # noqa: BLE001 - an error that cannot even be told
            error = "SystemError: the code raised an error that cannot be shown"
        for _ in range(_MAX_TRIES):
            try:
                self._restore()
                break
            except BaseException:  # noqa: BLE001 - a tracer may raise here, and the alarm may come in between
                continue
        try:
            printed = output.text()
        except BaseException:  # noqa: BLE001 - the code took its own output apart
            printed, error = "", error or "SystemError: the output cannot be shown"
        longest = self._output + _BESIDE_OUTPUT
        return Ran(_sendable(printed)[:longest], _sendable(error)[-longest:], is_late)

    def _outcome(self, request: Run, output: _Output) -> str:
        """What went wrong; empty: nothing. Telling it is part of the code's time: it may run the code's own methods."""
        self._may_interrupt = True
        signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, request.seconds, _REPEAT_SECONDS)
        try:
            self._execute(request.code, output)
        except (TimeIsUp, SystemExit) as ended:
            if isinstance(ended, TimeIsUp):
                raise
        except BaseException as raised:  # noqa: BLE001 - the code's own, told to whoever wrote it
            return _told(raised, self._output)
        return ""

    def _restore(self) -> None:
        """Takes back what code may have set, so that the next execution begins like the first."""
        self._may_interrupt = False
        sys.settrace(None)
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setrecursionlimit(self._recursion)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._may_interrupt:
            raise TimeIsUp

    def _execute(self, code: str, output: _Output) -> None:
        file = _FILE.format(self._count)
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        tree = ast.parse(code, file)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, file, "exec"), self._names)  # noqa: S102 - what a sandbox is for
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), self._names)  # noqa: S307 - the same
            if value is not None:
                output.write(f"{value!r}\n")


def _sendable(text: str) -> str:
    """The same text, with what is no character (half of a surrogate pair) written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _told(error: BaseException, longest: int) -> str:
    """The traceback from the code's own first frame on."""
    told = traceback.TracebackException.from_exception(error, limit=-50)
    start = _FILE.partition("{")[0]
    own = [at for at, frame in enumerate(told.stack) if frame.filename.startswith(start)]
    del told.stack[: own[0] if own else len(told.stack)]
    return "".join(told.format()).strip()[-longest:]


def prepare() -> None:
    """In the process that sandboxes are forked from."""
    for module in _WARM:
        importlib.import_module(module)


def reads() -> list[Path]:
    """Nothing beside the standard library, which every sandbox needs."""
    return []


def serve(connection: int, limits: SandboxLimits) -> None:
    """Until the other side hangs up."""
    random.seed(0)
    runner = CodeRunner(limits.output)
    with os.fdopen(connection, "rb") as requests, os.fdopen(os.dup(connection), "wb") as replies:
        while (body := read_frame(requests)) is not None:
            write_frame(replies, runner.run(msgspec.msgpack.decode(body, type=Run)))
