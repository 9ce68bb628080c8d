"""How the figures of the benchmarks of learning curves are shown."""

from collections.abc import Callable, Mapping
from typing import Any

from markdown_tables import table

Figures = Mapping[str, Any]

LEARNING = """The demo's training, with GiGPO's advantages, until it crosses 80 % of the held-out lakes, greedily, and where it ends: 40 steps, synchronous and
asynchronous (`async_generation_ratio: 1`), and 100 with trees of eight leaves in the place of groups of eight, which sample
about as many tokens. Validation's own time is left out."""

STALENESS = """What is left of the on-policy result when every token is four versions old: the demo's training (80 steps in the place of 150)
with plain clipping and with the losses that did best on training lakes in one shorter run each. Held-out lakes are played at the
end: 1,024 with the sampling of training, 256 greedily. [Staleness](staleness.md) says how, and what follows."""

LEAST_SHARE = 0.95
"""Of the on-policy result."""


def _learning(figures: Figures) -> list[str]:
    def number(value: float | None) -> str:
        return "not by every seed" if value is None else f"{value:,.0f}"

    rows = [
        (
            each["arm"],
            *(number(each[name]) for name in ("steps", "tokens", "cpu_seconds", "seconds")),
            f"{100 * each['final']:.1f}"
            + (f" ± {100 * each['final_error']:.1f}" if each["final_error"] is not None else "")
            + " %",
        )
        for each in figures["arms"]
    ]
    enough = f"{100 * figures['enough']:.0f} %"
    heads = ("arm", f"steps to {enough}", "sampled tokens", "CPU seconds", "seconds", "at the end")
    return [
        f"{figures['seeds']} seeds; means, and the standard error of the last column.",
        "",
        table(heads, rows),
        "",
        "![held-out lakes crossed, by tokens and by CPU seconds](../bench/results/learning.png)",
    ]


def _staleness(figures: Figures) -> list[str]:
    def percent(value: float) -> str:
        return f"{100 * value:.1f} %"

    heads = (
        "loss",
        "seeds",
        "mean age",
        "sampled",
        "of on-policy",
        "greedy",
        "of on-policy",
        "clipped tokens",
        f"steps to {100 * figures['most']:.0f} % on training lakes",
    )
    rows = [
        (
            each["arm"],
            str(each["seeds"]),
            f"{each['mean_age']:.2f}",
            f"{percent(each['sampled'])} ± {100 * each['sampled_error']:.1f}",
            percent(each["sampled_kept"]),
            percent(each["greedy"]),
            percent(each["greedy_kept"]),
            percent(each["clip_share"]),
            ", ".join("never" if step is None else str(step) for step in each["steps_to_most"]),
        )
        for each in figures["arms"]
    ]
    chosen = [
        (each["arm"], percent(each["training"]), f"{each['mean_age']:.2f}") for each in figures["selection"]
    ]
    stale = [each for each in figures["arms"] if each["arm"] != "on-policy"]
    best = max(stale, key=lambda each: float(each["sampled_kept"]))
    kept = "kept" if best["sampled_kept"] >= LEAST_SHARE else "**not kept**"
    return [
        table(heads, rows),
        "",
        f"Promise: the best loss keeps at least {100 * LEAST_SHARE:.0f} % of the on-policy result: {kept} "
        f"({best['arm']}, {percent(best['sampled_kept'])} sampled and {percent(best['greedy_kept'])} greedy).",
        "",
        "Candidates, one run each with a seed of its own, on training lakes alone:",
        "",
        table(("loss", "lakes crossed in the last 10 of 40 steps", "mean age"), chosen),
        "",
        "![lakes crossed by step, on-policy and with stale batches](../bench/results/staleness.png)",
    ]


REPORTS: Mapping[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "learning": (LEARNING, _learning),
    "staleness": (STALENESS, _staleness),
}
