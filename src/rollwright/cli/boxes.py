"""Tables of this machine's boxes and images."""

import time
from pathlib import Path

from rich import box
from rich.table import Table

from rollwright.cli.console import clock_time
from rollwright.sandbox import cgroups
from rollwright.sandbox.leases import BoxRecord, boxes_folder, lease_end, list_records, now, start_time


def boxes_table(state: Path) -> Table | None:
    """All boxes with their owners; `None`: there are none."""
    records = list_records(state)
    if not records:
        return None
    table = Table(title=f"boxes on this machine: {len(records)}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("box", "backend", "image", "rollout", "worker", "age", "lease", "memory", "processes"):
        table.add_column(name, no_wrap=name == "box")
    for record in records:
        groups = cgroups.group_folders(record.id)
        memory = f"{cgroups.memory_used(groups) >> 20} MB" if groups else "–"
        table.add_row(
            record.id,
            record.backend,
            record.image or "–",
            record.label.rollout_id or "–",
            record.label.worker or "–",
            clock_time(max(0.0, time.time() - record.created)),
            _lease(state, record),
            memory,
            str(len(cgroups.processes_in(groups))) if groups else "–",
        )
    return table


def _lease(state: Path, record: BoxRecord) -> str:
    if record.holder and start_time(record.holder) != record.holder_start:
        return "nobody holds it"
    end = lease_end(boxes_folder(state) / record.id)
    left = 0.0 if end is None else end - now()
    return f"{left:.0f} s left" if left > 0 else "over"
