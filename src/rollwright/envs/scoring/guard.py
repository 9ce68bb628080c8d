"""Audit hook that stops any evaluation of code while an answer is scored.

Python raises audit events for every operation by which text could become code or reach outside: compiling, executing,
importing, opening files, sockets, processes, foreign memory. While a `watch` is open, every event outside a short list of
harmless ones raises where it occurs. It is also recorded, because scorers catch exceptions. An audit hook cannot be
removed, so this module is used only in the judge's process.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

HARMLESS = frozenset({"builtins.id", "sys._getframe", "array.__new__"})
"""Events that numpy, sympy and `copy` raise while they compute; none of them runs code."""

IMPORT = "import"


class EvaluationStopped(Exception):
    """A scorer attempted to evaluate code or to reach outside the process."""


@dataclass
class EvaluationWatch:
    """The first event that was stopped while the watch was open."""

    event: str | None = None
    detail: str = ""


_open: EvaluationWatch | None = None
_is_installed = False


def install() -> None:
    """Installs the hook for the lifetime of this process; it has no effect unless a watch is open."""
    global _is_installed
    if not _is_installed:
        sys.addaudithook(_audit)
        _is_installed = True


@contextmanager
def watch() -> Iterator[EvaluationWatch]:
    """Stops evaluation inside the block."""
    global _open
    assert _is_installed, "the audit hook is not installed"
    opened = EvaluationWatch()
    _open = opened
    try:
        yield opened
    finally:
        _open = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _open is None or event in HARMLESS:
        return
    if _open.event is None:
        _open.event = event
        _open.detail = str(arguments[0]) if event == IMPORT else ""
    raise EvaluationStopped(event)
