"""Start-up: how long it takes from nothing to the first generated token, cold and warm, part by part.

    python bench/startup.py

Every start is a process of its own. Before a cold one the kernel drops what it keeps of files, which needs root; where
that is not allowed, there are warm figures alone. `rollwright doctor --startup bench/results/startup.json` compares a
start now with these.
"""

import os
import sys

from rich.table import Table

from results_file import write_results
from rollwright.cli.console import console
from rollwright.doctor.startup import PARTS, StartedModel, drop_page_cache, measure_start, median_start, total

COLD_STARTS, WARM_STARTS = 3, 5
"""A cold start slows down whatever else runs on the machine, so there are few."""


def main() -> int:
    screen = console()
    load = os.getloadavg()[0]
    started = StartedModel()
    cold = []
    with started as model:
        for _ in range(COLD_STARTS):
            if not drop_page_cache():
                break
            cold.append(measure_start(model))
        if not cold:
            measure_start(model)  # so that the next one is warm
        warm = [measure_start(model) for _ in range(WARM_STARTS)]
    figures = {
        "load_before": round(load, 2),
        "priority": os.nice(0),
        "model": started.name,
        "warm": median_start(warm),
        "warm_totals": sorted(round(total(each), 2) for each in warm),
        "cold": median_start(cold) if cold else None,
        "cold_totals": sorted(round(total(each), 2) for each in cold),
    }
    table = Table("part", "cold, s", "warm, s", title=f"start-up with {started.name}")
    for part in PARTS:
        table.add_row(part, f"{figures['cold'][part]:.2f}" if cold else "–", f"{figures['warm'][part]:.2f}")
    screen.print(table)
    write_results("startup", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
