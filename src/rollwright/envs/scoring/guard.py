"""Stops any evaluation while an answer is judged, whichever scorer tries it.

Python tells an audit hook of everything through which text could become code or reach outside: compiling, executing,
importing, opening files, sockets, processes, foreign memory. While a `watch` is open, whatever is not in a short list of
harmless events is stopped where it happens, and noted, because scorers catch what they call raises. A hook stays for the
life of its process, so this belongs in a process of its own.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

HARMLESS = frozenset({"builtins.id", "sys._getframe", "array.__new__"})
"""Events that numpy, sympy and `copy` cause while they compute; none of them runs anything."""

IMPORT = "import"


class EvaluationStopped(Exception):
    """Raised where a scorer wanted to evaluate something, or to reach outside."""


@dataclass
class EvaluationWatch:
    """What was stopped while it was open; the first event counts."""

    event: str | None = None
    detail: str = ""


_open: EvaluationWatch | None = None
_is_installed = False


def install() -> None:
    """For the rest of this process's life; without effect until a watch is opened."""
    global _is_installed
    if not _is_installed:
        sys.addaudithook(_hear)
        _is_installed = True


@contextmanager
def watch() -> Iterator[EvaluationWatch]:
    """What happens inside evaluates nothing."""
    global _open
    assert _is_installed, "nobody would hear anything"
    opened = EvaluationWatch()
    _open = opened
    try:
        yield opened
    finally:
        _open = None


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if _open is None or event in HARMLESS:
        return
    if _open.event is None:
        _open.event = event
        _open.detail = str(arguments[0]) if event == IMPORT else ""
    raise EvaluationStopped(event)
