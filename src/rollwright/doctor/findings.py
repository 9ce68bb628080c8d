"""What a check found: whether it is well, and what to do when it is not."""

from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    """How bad it is."""

    WELL = "ok"
    NOTE = "note"
    """Works, but could be better, or could not be checked."""
    FIX = "fix"
    """Something does not work until this is done."""


@dataclass(frozen=True)
class Finding:
    about: str
    """What was looked at: machine, config, engine …"""
    health: Health
    what: str
    fix: str = ""
    """What to do; empty where there is nothing to do."""


def well(about: str, what: str) -> Finding:
    return Finding(about, Health.WELL, what)


def note(about: str, what: str, fix: str = "") -> Finding:
    return Finding(about, Health.NOTE, what, fix)


def must_fix(about: str, what: str, fix: str) -> Finding:
    return Finding(about, Health.FIX, what, fix)
