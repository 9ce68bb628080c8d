"""Finds the finished, started and due validations of a run in its record and its store. Pure.

Invariant: a validation that was started is either in the record, once, or its rollouts are in the store, and a resumed run
finishes it.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rollwright.rollout.accounting import Fate, Ledger

VALIDATION = "val"
"""`mode` of a validation's rollouts and of its line in the record."""


def stream_of(number: int) -> str:
    """Name of a validation's stream of groups."""
    return f"{VALIDATION}{number}"


def recorded_validations(rows: Iterable[Mapping[str, Any]]) -> dict[int, Ledger]:
    """Ledgers of the recorded validations, by number."""
    return {int(row["step"]): _ledger(row) for row in rows if row["mode"] == VALIDATION}


def _ledger(row: Mapping[str, Any]) -> Ledger:
    """Ledger of a line; a line without one has only the number of delivered rollouts."""
    ledger = Ledger()
    told = row.get("ledger")
    if told is None:
        ledger.counts[Fate.DELIVERED] = int(row["trajectories"])
        return ledger
    ledger.counts.update({place: int(told.get(place, 0)) for place in Fate})
    ledger.reasons.update({str(reason): int(count) for reason, count in row.get("reasons", {}).items()})
    return ledger


def begun_validations(name: str, rollout_ids: Iterable[str]) -> set[int]:
    """Numbers of the validations that these rollouts of a run belong to."""
    pattern = re.compile(rf"{re.escape(name)}\.{VALIDATION}(\d+)-g\d+-m\d+")
    return {int(found[1]) for each in rollout_ids if (found := pattern.fullmatch(each)) is not None}


def due_validations(steps: int, eval_steps: int | None, recorded: Collection[int]) -> list[int]:
    """Numbers of the validations due between the first `steps` batches that are not recorded."""
    if eval_steps is None:
        return []
    return [number for number in range(eval_steps, steps + 1, eval_steps) if number not in recorded]
