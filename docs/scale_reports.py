"""How the figures of the benchmarks of swarms and object storage are shown."""

from collections.abc import Callable, Mapping
from typing import Any

from markdown_tables import promise_table, table

Figures = Mapping[str, Any]

SWARM_SCALE = """A swarm of simulated nodes with the real exchange in virtual time: a fifth of them hostile, a twentieth of the honest
ones replaced in every round, half of the regions cut off for a while. [Ten thousand nodes](swarm_scale.md) says what is real and
what is not. Bytes, signature checks and CPU are for each honest node and round after the warm-up; CPU is the signatures that it
checks and makes, times what one costs."""

OBJECTS = """Rollouts started and finished on SQLite with trajectories of 8 KB, in their rows and as objects beside them
([trajectories as objects](store.md#trajectories-as-objects)). A million follows from the slope between the two sizes measured."""


def _swarm_scale(figures: Figures) -> list[str]:
    arms = figures["arms"]
    rows = []
    for name, row in arms.items():
        kind, _, _ = name.partition("_")
        across = row["across"]
        rows.append(
            (
                f"{row['nodes']:,}",
                kind,
                f"{row['received']['announce'] / 1e3:.1f} / {row['sent']['announce'] / 1e3:.1f}",
                f"{row['received']['content'] / 1e3:.1f}",
                f"{row['checked']:,.0f}",
                f"{row['check_ms']:.1f}",
                f"{row['useful_share']:.2f}",
                str(row["poison_trained"]),
                "–" if row["newcomer_rounds"] is None else f"{row['newcomer_rounds']:.2f}",
                "–" if row["reach_seconds"] is None else f"{row['reached']:.0f}",
                "–" if row["hostile_in_view"] is None else f"{row['hostile_in_view']:.2f}",
                " / ".join(f"{each:.2f}" for each in across.values()) or "–",
            )
        )
    heads = (
        *(
            "nodes",
            "announce",
            "announcing, KB in / out",
            "content, KB in",
            "checks",
            "CPU, ms",
            "useful share",
            "poison trained",
        ),
        *("newcomer's rounds", "nodes reached", "hostile in view", "across the cut: before / during / after"),
    )
    views = {row["nodes"]: row for name, row in arms.items() if name.startswith("views")}
    promises = [
        (
            "nothing of a poisoner is trained on",
            f"{sum(row['poison_trained'] for row in arms.values())} groups",
            not any(row["poison_trained"] for row in arms.values()),
        )
    ]
    if len(views) > 1:
        small, large = min(views), max(views)
        ratio = views[large]["received"]["announce"] / views[small]["received"]["announce"]
        promises.append(
            (
                f"bytes with views are flat from {small:,} to {large:,} nodes (≤ 1.3×)",
                f"{ratio:.2f}×",
                ratio <= 1.3,
            )
        )
        ratio = views[large]["checked"] / views[small]["checked"]
        promises.append(
            ("so are signature checks, and the CPU for them (≤ 1.3×)", f"{ratio:.2f}×", ratio <= 1.3)
        )
    for nodes, row in sorted(views.items()):
        settled = row["curve"][1:]
        if settled:
            least = min(each["useful_share"] for each in settled)
            promises.append(
                (
                    f"{nodes:,} nodes get the groups that they may take, from the second round on (≥ 0.95)",
                    f"{least:.2f}",
                    least >= 0.95,
                )
            )
            hostile = settled[-1]["hostile_in_view"]
            promises.append(
                (
                    f"{nodes:,} nodes: hostile peers have no more than their share of views in the last round (≤ 0.20)",
                    f"{hostile:.2f}",
                    hostile <= 0.2,
                )
            )
    costs = f"A signature takes {figures['sign_us']:.0f} µs, its check {figures['check_us']:.0f} µs."
    return [
        *(table(heads, rows), "", costs, ""),
        *("With views, by the rounds of nodes that were there from the start:", "", _by_round(views), ""),
        promise_table(promises),
    ]


def _by_round(views: Mapping[int, Figures]) -> str:
    rows = [
        (
            f"{nodes:,}",
            str(each["round"]),
            f"{each['seconds']:.0f}",
            f"{each['useful_share']:.2f}",
            f"{each['hostile_in_view']:.2f}",
            f"{each['kilobytes']:.0f}",
            f"{each['checked']:.0f}",
        )
        for nodes, row in sorted(views.items())
        for each in row["curve"]
    ]
    heads = ("nodes", "round", "ends after, s", "useful share", "hostile in view", "KB in", "checks")
    return table(heads, rows)


def _objects(figures: Figures) -> list[str]:
    arms = figures["arms"]
    rows = [
        (
            name,
            f"{row['rollouts']:,}",
            f"{row['bytes_per_rollout']:,.0f}",
            f"{row['million_mb']:,.0f}",
            f"{row['cpu_us_per_rollout']:,.0f}",
            f"{row['cpu_us_per_rollout'] / arms['row']['cpu_us_per_rollout']:.1f}",
        )
        for name, row in arms.items()
    ]
    heads = (
        "trajectories in",
        "rollouts",
        "bytes of the database each",
        "a million, MB",
        "CPU µs each",
        "× the row's",
    )
    return [table(heads, rows)]


REPORTS: Mapping[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "swarm_scale": (SWARM_SCALE, _swarm_scale),
    "objects": (OBJECTS, _objects),
}
