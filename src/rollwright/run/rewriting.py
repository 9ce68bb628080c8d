"""Rewriting the files of a run folder: without damaged lines, without pruned rows, with the costs of pruned rollouts summed.

Invariant: after a kill or a power cut, a file has its old or its new content.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rollwright.errors import naming
from rollwright.run.retention import Forgotten, replace_durably
from rollwright.run.sealed_rows import SealedRows, read_rows, seal
from rollwright.run.trajectory_log import LogCopy


class KeptLog:
    """The part of a run's log that pruning keeps."""

    def __init__(self, forgotten: Forgotten, recorded: Collection[str]) -> None:
        """`recorded`: groups of the record."""
        self.forgotten = forgotten
        self._recorded = recorded
        self.copy: LogCopy | None = None

    def leaves_out(self, rollout_id: str) -> bool:
        """Whether the rollout is pruned, or of another peer's group that came into no batch before the run was killed."""
        group_id = rollout_id.rpartition("-m")[0]
        foreign = not group_id.startswith(f"{self.forgotten.name}.")
        return self.forgotten.has_group(group_id) or (foreign and group_id not in self._recorded)


def repair_rows(found: SealedRows) -> list[str]:
    """Rewrite a file of rows without its damaged and partial lines; returns one line for each kind of damage."""
    if found.damaged:
        aside = found.file.with_name(f"{found.file.name}.damaged")
        with naming(aside), aside.open("ab") as opened:
            opened.writelines(line + b"\n" for _, line in found.damaged)
    if found.damaged or found.mended or found.cut_off or found.unsealed:
        replace_durably(found.file, row_lines(found.rows))
    return list(found.told())


def remove_rows(file: Path, is_forgotten: Callable[[dict[str, Any]], bool]) -> None:
    rows = read_rows(file).rows
    kept = [row for row in rows if not is_forgotten(row)]
    if len(kept) < len(rows):
        replace_durably(file, row_lines(kept))


def fold_costs(file: Path, is_forgotten: Callable[[str], bool]) -> None:
    """Replace the costs of pruned rollouts, and those of groups' judges, by their sum: one line for each tag, without a
    rollout."""
    kept: list[dict[str, Any]] = []
    sums: dict[str, dict[str, Any]] = {}
    for row in read_rows(file).rows:
        if row["rollout_id"] and not is_forgotten(row["rollout_id"]):
            kept.append(row)
            continue
        tag = row.get("tag", "")
        total = sums.setdefault(tag, {"rollouts": 0, "seconds": 0.0, "clock": 0.0, "used": {}})
        total["rollouts"] += row.get("rollouts", 1)
        total["seconds"] += row.get("seconds", 0.0)
        total["clock"] = max(total["clock"], row.get("clock", 0.0))
        for *key, calls, prompt, cached, completion, reasoning in row["used"]:
            counts = total["used"].setdefault(tuple(key), [0, 0, 0, 0, 0])
            for place, count in enumerate((calls, prompt, cached, completion, reasoning)):
                counts[place] += count
    folded = [
        {
            "rollout_id": "",
            "rollouts": total["rollouts"],
            "tag": tag,
            "seconds": round(total["seconds"], 3),
            "clock": total["clock"],
            "used": [[*key, *counts] for key, counts in total["used"].items()],
        }
        for tag, total in sums.items()
    ]
    if folded:
        replace_durably(file, row_lines([*folded, *kept]))


def row_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(seal(row) + "\n" for row in rows)
