"""The validations of a run, out of its record and its store. Pure.

Always true: a validation that was begun is either in the record, once, or under way: its rollouts are in the store then,
and whoever resumes the run goes on with it.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rollwright.rollout.accounting import Fate, Ledger

VALIDATION = "val"
"""`mode` of its rollouts and of its line in the record."""


def stream_of(number: int) -> str:
    """The name of a validation's stream of groups."""
    return f"{VALIDATION}{number}"


def recorded_validations(rows: Iterable[Mapping[str, Any]]) -> dict[int, Ledger]:
    """Of the validations that are in the record, where their rollouts went, by number."""
    return {int(row["step"]): _ledger(row) for row in rows if row["mode"] == VALIDATION}


def _ledger(row: Mapping[str, Any]) -> Ledger:
    """A line without one says at least what was handed out."""
    ledger = Ledger()
    told = row.get("ledger")
    if told is None:
        ledger.counts[Fate.DELIVERED] = int(row["trajectories"])
        return ledger
    ledger.counts.update({place: int(told.get(place, 0)) for place in Fate})
    ledger.reasons.update({str(reason): int(count) for reason, count in row.get("reasons", {}).items()})
    return ledger


def begun_validations(name: str, rollout_ids: Iterable[str]) -> set[int]:
    """The numbers of the validations that these rollouts of a run belong to."""
    pattern = re.compile(rf"{re.escape(name)}\.{VALIDATION}(\d+)-g\d+-m\d+")
    return {int(found[1]) for each in rollout_ids if (found := pattern.fullmatch(each)) is not None}


def due_validations(steps: int, eval_steps: int | None, recorded: Collection[int]) -> list[int]:
    """Those that were due after the first `steps` batches, between them, and are not in the record."""
    if eval_steps is None:
        return []
    return [number for number in range(eval_steps, steps + 1, eval_steps) if number not in recorded]
