"""Sandbox program that executes Python code. It shares its process with hostile code, so no other process trusts it.

Always true: output, exceptions and leftovers of code (lone surrogates, exceptions whose `str` raises, a replaced
`sys.stdout`, tracers, signal handlers, limits) end at most the execution that caused them, with a message. Code that
breaks the interpreter itself ends its sandbox, and the result says so.

Variables persist from one execution to the next, as in an interactive session, and the value of a last expression is
printed. A time limit interrupts the code and keeps the state. Random numbers start from the same seed in every sandbox,
so that replayed code gives the same output.
"""

import ast
import builtins
import importlib
import io
import linecache
import os
import random
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from rollwright.sandbox.protocol import (
    ExecuteRequest,
    ExecutionResult,
    SandboxLimits,
    frame,
    receive_frame,
    send_frame,
)

_REPEAT_SECONDS = 0.1
"""Interval at which code that catches the interruption is interrupted again."""

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
"""Frequently imported modules, which the fork server imports once for all sandboxes."""

_FIRST_PROGRAMS = 12 * ("x = sum(range(3))\nprint(x)\nx + 1",) + ("1 / 0",)
"""Executed once in the fork server; after some repetitions the interpreter leaves its instructions as they are."""

_MAX_TRIES = 5
"""Attempts to restore the interpreter: a tracer or profiler that raises is removed after it did, and fails one attempt."""

_NOTE_LENGTH = 100
"""Characters for the note about dropped output."""

_FILE = "<code {}>"


class ExecutionTimeout(BaseException):
    """Raised in the code at its time limit; not an `Exception`, so that code seldom catches it."""


class _Output(io.TextIOBase):
    """Text stream that keeps the first `room` characters and counts the dropped ones."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._parts: list[str] = []
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        plain = _escape_surrogates("".join((text,)))  # `join` gives a plain `str` also for a hostile subclass
        kept = plain[: self._room]
        self._room -= len(kept)
        self._parts.append(kept)
        self._dropped += len(plain) - len(kept)
        return str.__len__(text)

    def text(self) -> str:
        cut = f"\n[{self._dropped} more characters]" if self._dropped else ""
        return "".join(self._parts) + cut


class CodeRunner:
    """Executes pieces of code one after the other in one namespace."""

    def __init__(self) -> None:
        self._output = 0
        self._names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self._count = 0
        self._may_interrupt = False
        self._recursion = sys.getrecursionlimit()
        signal.signal(signal.SIGALRM, self._interrupt)

    def serve(self, connection: int, output: int) -> None:
        """Executes requests until the client closes the socket. `output`: characters that are kept of each execution."""
        self._output = output
        while (body := receive_frame(connection)) is not None:
            send_frame(connection, self.run(msgspec.msgpack.decode(body, type=ExecuteRequest)))

    def run(self, request: ExecuteRequest) -> ExecutionResult:
        self._count += 1
        output = _Output(self._output)
        sys.stdout = sys.stderr = output
        error, is_late = "", False
        try:
            error = self._run_timed(request, output)
        except ExecutionTimeout:
            error, is_late = f"TimeoutError: stopped after {request.seconds:g} s", True
        except BaseException:  # noqa: BLE001 - formatting the exception raised
            error = "SystemError: the code raised an error that cannot be shown"
        for _ in range(_MAX_TRIES):
            try:
                self._restore()
                break
            except BaseException:  # noqa: BLE001 - a tracer may raise here, or the alarm may fire
                continue
        try:
            printed = output.text()
        except BaseException:  # noqa: BLE001 - the code damaged the output object
            printed, error = "", error or "SystemError: the output cannot be shown"
        longest = self._output + _NOTE_LENGTH
        return ExecutionResult(
            _escape_surrogates(printed)[:longest], _escape_surrogates(error)[-longest:], is_late
        )

    def _run_timed(self, request: ExecuteRequest, output: _Output) -> str:
        """Executes the code and returns its traceback, empty if there is none. Formatting counts against the time limit,
        because it may call the code's own methods."""
        self._may_interrupt = True
        if self._count > 1:  # earlier code may have changed it
            signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, request.seconds, _REPEAT_SECONDS)
        try:
            self._execute(request.code, output)
        except (ExecutionTimeout, SystemExit) as ended:
            if isinstance(ended, ExecutionTimeout):
                raise
        except BaseException as raised:  # noqa: BLE001 - the code's own exception, reported as its result
            return _format_error(raised, self._output)
        return ""

    def _restore(self) -> None:
        """Resets interpreter settings that code may have changed, so that the next execution starts like the first."""
        self._may_interrupt = False
        sys.settrace(None)
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setrecursionlimit(self._recursion)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._may_interrupt:
            raise ExecutionTimeout

    def _execute(self, code: str, output: _Output) -> None:
        file = _FILE.format(self._count)
        # Tracebacks then show the lines of the code. No mtime, so that the entry is never checked against a file.
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        tree = ast.parse(code, file)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, file, "exec"), self._names)  # noqa: S102 - the purpose of a sandbox
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), self._names)  # noqa: S307 - the same
            if value is not None:
                output.write(f"{value!r}\n")


def _escape_surrogates(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, as backslash escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _format_error(error: BaseException, longest: int) -> str:
    """The traceback from the code's own first frame on."""
    report = traceback.TracebackException.from_exception(error, limit=-50)
    start = _FILE.partition("{")[0]
    own = [at for at, frame in enumerate(report.stack) if frame.filename.startswith(start)]
    del report.stack[: own[0] if own else len(report.stack)]
    return "".join(report.format()).strip()[-longest:]


_prepared: CodeRunner | None = None
"""Made in the fork server, so that no sandbox has to."""


def prepare() -> None:
    """Imports frequently used modules and executes code, in the fork server: what the interpreter sets up at the first use of
    its compiler, and where it rewrites its own instructions, would otherwise be done, and copied, in every sandbox."""
    global _prepared
    for module in _WARM:
        importlib.import_module(module)
    before = sys.stdout, sys.stderr
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for code in _FIRST_PROGRAMS:
            ours.sendall(frame(ExecuteRequest(code, 60.0)))
        ours.shutdown(socket.SHUT_WR)
        serve(theirs.fileno(), SandboxLimits())
    sys.stdout, sys.stderr = before
    linecache.clearcache()
    _prepared = CodeRunner()
    random.seed(0)
    os.register_at_fork(after_in_child=_seed)  # after the function of `random`, which draws another seed


def _seed() -> None:
    random.seed(0)


def reads() -> list[Path]:
    """No files beside the standard library, which every sandbox can read."""
    return []


def serve(connection: int, limits: SandboxLimits) -> None:
    """Executes requests until the client closes the socket."""
    (_prepared or CodeRunner()).serve(connection, limits.output)
