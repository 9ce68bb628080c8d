"""What a swarm of a hundred, a thousand and ten thousand nodes costs each of them, in virtual time.

    python bench/swarm_scale.py                 # all
    python bench/swarm_scale.py views_10000     # one arm again; the figures of the others stay
    python bench/swarm_scale.py draw            # the picture again

The nodes run the package's own exchange: keys and signatures, gossip, admission, selection, fetching, verification by replay,
quarantine. The network, the model's play and its log-probabilities are stand-ins (`rollwright.swarm.simulation`). A fifth of
the nodes is hostile: poisoners, which pass on what other hostile nodes made, and censors, which offer what they do not have. A
twentieth of the honest nodes leaves in every round, and as many join. Half of the regions is cut off from the others for a
while. Beside partial views (`announce: views`) stands full announcement (`announce: all`) at 100 and 1,000 nodes, where at
1,000 only 40 nodes take groups: their bytes and checks are measured, those of the others would be the same.

CPU for each node is counted, not timed: signatures checked and made, times what one costs. A node has little other work, and the
process that simulates them all has plenty.

Prints a table, writes `bench/results/swarm_scale.json` and `docs/images/swarm_scale.png`. An arm writes its figures every ten
virtual seconds, so a run that is stopped keeps what it found. 10,000 nodes take about ten times the CPU of 1,000.
"""

import dataclasses
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.aio import run_virtual
from rollwright.swarm.identity import Identity, is_signed
from rollwright.swarm.simulation.world import WorldReport, WorldSettings, simulate

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "images" / "swarm_scale.png"

ARMS = {
    "all_100": WorldSettings(100, "all", seconds=130, warm_up=40, partition=(60, 85)),
    "all_1000": WorldSettings(1000, "all", seconds=50, warm_up=24, gathering=40),
    "views_100": WorldSettings(100, "views", seconds=160, warm_up=40, partition=(85, 110)),
    "views_1000": WorldSettings(1000, "views", seconds=130, warm_up=40, partition=(85, 110)),
    "views_10000": WorldSettings(10_000, "views", seconds=130, warm_up=40, partition=(85, 110)),
}
"""A round takes 20 to 30 s; `warm_up` is the first."""


def unit_costs() -> dict[str, float]:
    """Microseconds of CPU for a signature and for its check."""
    identity, message, count = Identity.generate(), b"m" * 400, 500
    began = time.process_time()
    for _ in range(count):
        signature = identity.sign(message)
    signed = time.process_time()
    for _ in range(count):
        is_signed(identity.peer, message, signature)
    checked = time.process_time()
    return {"sign_us": 1e6 * (signed - began) / count, "check_us": 1e6 * (checked - signed) / count}


def run_arm(name: str, note: Callable[[dict[str, Any]], None]) -> None:
    """One arm in a process of its own, so that none has another's memory. `note` gets its figures as they stand, some times
    before the end: what a run of ten thousand has found is not lost if it is stopped."""
    load = os.getloadavg()[0]
    with subprocess.Popen(
        [sys.executable, __file__, "arm", name],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            found: dict[str, Any] = json.loads(line)
            note({**dataclasses.asdict(ARMS[name]), **found, "load_before": load})
    if child.returncode:
        raise SystemExit(f"{name} ended with {child.returncode}")


def play_arm(name: str) -> None:
    def report(found: WorldReport) -> None:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({**dataclasses.asdict(found), "memory_mib": memory}), flush=True)

    report(run_virtual(simulate(ARMS[name], report)))


def show(console: Console, arms: dict[str, Any]) -> None:
    table = Table(
        *("arm", "KB in", "KB out", "checks", "CPU ms", "useful", "poison trained", "caught"),
        *("newcomer, rounds", "reached nodes", "hostile in view", "across: before / during / after"),
    )
    for name, row in arms.items():
        across = " / ".join(f"{each:.2f}" for each in row["across"].values()) or "–"
        hostile = row["hostile_in_view"]
        table.add_row(
            name,
            f"{sum(row['received'].values()) / 1e3:.1f}",
            f"{sum(row['sent'].values()) / 1e3:.1f}",
            f"{row['checked']:.0f}",
            f"{row['check_ms']:.1f}",
            f"{row['useful_share']:.2f}",
            str(row["poison_trained"]),
            str(row["poison_refused"]),
            "–" if row["newcomer_rounds"] is None else f"{row['newcomer_rounds']:.2f}",
            f"{row['reached']:.0f}",
            "–" if hostile is None else f"{hostile:.2f}",
            across,
        )
    console.print(table)


def draw(arms: dict[str, Any], path: Path) -> None:
    """The picture of the page: costs by the number of nodes, and by round what settles over rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    costs = (
        (axes[0][0], "KB received for announcements,\nfor each node and round", _announce_kb),
        (axes[0][1], "ms of CPU for signatures,\nfor each node and round", lambda row: row["check_ms"]),
    )
    for axis, title, value in costs:
        for kind, style in (("all", "o--C0"), ("views", "s-C1")):
            rows = sorted(
                (row["nodes"], value(row)) for name, row in arms.items() if name.startswith(kind + "_")
            )
            axis.plot(*zip(*rows, strict=True), style, label=f"announce: {kind}")
        axis.set(xscale="log", yscale="log", xlim=(70, 14_000), ylim=(1, 1000), xlabel="nodes")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(title, fontsize=10)
        axis.legend()
    curves = (
        (axes[1][0], "foreign groups taken,\nof those that a round may take", "useful_share", 1.05),
        (axes[1][1], "hostile peers in an honest view\n(a fifth of all nodes)", "hostile_in_view", 1.0),
    )
    views = {name: row for name, row in arms.items() if name.startswith("views_")}
    for axis, title, key, most in curves:
        for row in sorted(views.values(), key=lambda each: each["nodes"]):
            points = [(each["round"], each[key]) for each in row["curve"] if each[key] is not None]
            axis.plot(*zip(*points, strict=True), "o-", label=f"{row['nodes']:,} nodes, views")
        axis.set(xlabel="a node's round", ylim=(0, most))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_title(title, fontsize=10)
        axis.legend()
    axes[1][1].axhline(0.2, color="grey", linestyle=":")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _announce_kb(row: dict[str, Any]) -> float:
    return float(row["received"]["announce"]) / 1e3


def main() -> None:
    logging.disable(logging.CRITICAL)  # a line for every peer that is caught
    if sys.argv[1:2] == ["arm"]:
        play_arm(sys.argv[2])
        return
    console = Console()
    load = os.getloadavg()[0]
    chosen = sys.argv[1:] or list(ARMS)
    before = RESULTS / "swarm_scale.json"
    if chosen == ["draw"]:
        draw(json.loads(before.read_text())["arms"], PICTURE)
        return
    arms = json.loads(before.read_text())["arms"] if before.is_file() and sys.argv[1:] else {}
    costs = unit_costs()
    for name in chosen:

        def note(found: dict[str, Any], name: str = name) -> None:
            arms[name] = found
            # Of all arms with one measurement, so that they can be compared.
            for each in arms.values():
                spent = each["checked"] * costs["check_us"] + each["signed"] * costs["sign_us"]
                each["check_ms"] = spent / 1e3
            write_results("swarm_scale", {"load_before": load, **costs, "arms": arms})

        with console.status(name):
            run_arm(name, note)
        console.print(f"{name}: {arms[name]['cpu_seconds']:.0f} s of CPU")
    draw(arms, PICTURE)
    show(console, arms)
    console.print(f"written to {RESULTS / 'swarm_scale.json'}")
    if any(row["poison_trained"] for row in arms.values()):
        raise SystemExit("poison was trained on")


if __name__ == "__main__":
    main()
