"""How the figures of the benchmarks of learning curves are shown."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markdown_tables import table

Figures = Mapping[str, Any]

LEARNING = """The demo's training, with GiGPO's advantages, until it crosses 80 % of the held-out lakes, greedily, and where it ends: 40 steps, synchronous and
asynchronous (`async_generation_ratio: 1`), and 100 with trees of eight leaves in the place of groups of eight, which sample
about as many tokens. Validation's own time is left out."""

STALENESS = """What is left of the on-policy result when every token is four versions old: the demo's training (80 steps in the place of 150)
with plain clipping and with the losses that did best on training lakes in one shorter run each. Held-out lakes are played at the
end: 1,024 with the sampling of training, 256 greedily. [Staleness](staleness.md) says how, and what follows."""

ARMS = """Chains and trees until they reach the goal on lakes held out by structure, by seed. `lakes`: those of the demo, of which the
base model crosses half, until 80 % are crossed greedily. `detours`: lakes without a straight way, of which it crosses 2 %
when it samples and none greedily, until 50 %. `long_detours`: those whose way has seven moves or more (0.5 % when it samples),
until 20 %. `grpo`, `rloo` and `gigpo` compare eight chains, `rloo_4` four, `rloo_4_known` too, with the running value that the
trees have; `tree` plays two trees that keep eight branches alive, `small_tree` two that keep four, `one_tree` one that keeps four, all
with the shrunk baseline. 48 levels for each step, at most 40 steps, 80 on `long_detours`, whose trainings end at the goal; a seed
that does not reach the goal counts with all that it spent (`>`). Intervals of 95 % are over seeds."""

SIGNAL_COST = """What a measurement of the gradient's signal and noise costs: CPU time of a trainer's step that measures, beside one of the
same batch that does not, in turns. A run measures one step in `training.signal_steps`."""

VERDICTS = """The verdict on learning, of trainings whose truth is known because they were made that way: the demo's model on its lakes, 16
groups of 8 for each step unless stated otherwise, with one thing wrong or nothing. Judged after every step from the tenth on. A
false alarm is a finding that the construction does not make true; *missed* is a training whose last verdict names none of what is
wrong."""

MOST_TREE_TOKENS = 0.7
"""Of the best chains' tokens to the goal, on one task at least."""

ENOUGH_SEEDS = 5
"""Of both arms, for the promise to be judged by them."""

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


def _learning_arms(figures: Figures) -> list[str]:
    def spent(each: Figures, name: str) -> str:
        value = each[name]
        mark = "" if each["reached"] == each["seeds"] else "> "
        if value["low"] is None:
            return f"{mark}{value['mean']:,.0f}"
        return f"{mark}{value['mean']:,.0f} ({value['low']:,.0f} to {value['high']:,.0f})"

    rows = [
        (
            f"`{each['task']}`",
            each["mode"],
            f"`{each['arm']}`",
            f"{each['reached']} of {each['seeds']}",
            spent(each, "tokens"),
            spent(each, "cpu_seconds"),
            f"{100 * each['final']['mean']:.0f} %",
        )
        for each in figures["rows"]
    ]
    heads = (
        "task",
        "mode",
        "arm",
        "seeds at the goal",
        "sampled tokens to it",
        "CPU seconds",
        "at the end",
    )
    picture = "![held-out lakes crossed by sampled tokens, synchronous trainings](../bench/results/learning_arms.png)"
    return [
        table(heads, rows),
        "",
        *_tree_verdicts(figures["rows"]),
        *_missing(figures["missing"]),
        "",
        picture,
    ]


def _tree_verdicts(rows: Sequence[Figures]) -> list[str]:
    """The best tree beside the best chains, for each task and mode that has both."""
    found, ratios = [], []
    for task, mode in dict.fromkeys((each["task"], each["mode"]) for each in rows):
        here = [each for each in rows if (each["task"], each["mode"]) == (task, mode)]
        trees = [each for each in here if "tree" in each["arm"]]
        chains = [each for each in here if "tree" not in each["arm"]]
        if not trees or not chains:
            continue
        tree, chain = (min(arms, key=lambda each: float(each["tokens"]["mean"])) for arms in (trees, chains))
        ratio = tree["tokens"]["mean"] / chain["tokens"]["mean"]
        if min(tree["seeds"], chain["seeds"]) >= ENOUGH_SEEDS:
            ratios.append(ratio)
        seeds = f"{tree['seeds']} and {chain['seeds']}"
        found.append((f"`{task}`", mode, f"`{tree['arm']}`", f"`{chain['arm']}`", seeds, f"{ratio:.2f}"))
    if not found:
        return []
    kept = "kept" if min(ratios, default=math.inf) <= MOST_TREE_TOKENS else "**not kept**"
    least = f"{min(ratios):.2f}" if ratios else "nowhere so many seeds"
    return [
        table(("task", "mode", "best tree", "best chains", "seeds", "tokens, tree / chains"), found),
        "",
        f"Promise: at most {MOST_TREE_TOKENS} times the best chains' tokens on one task at least, with five seeds or more "
        f"each: {kept} ({least}). [Trees](trees.md#what-a-tree-buys) says what was tried.",
    ]


def _missing(cells: Sequence[str]) -> list[str]:
    return ["", f"Not measured: {len(cells)} of the table's trainings."] if cells else []


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


def _signal_cost(figures: Figures) -> list[str]:
    batches = figures["batches"]
    rows = [
        (
            name,
            f"{each['plain_seconds']:.3f}",
            f"{each['measured_seconds']:.3f}",
            f"{each['of_a_step']:+.1%} ({each['least']:+.1%} to {each['most']:+.1%})",
            f"{each['of_a_run']:+.2%}",
        )
        for name, each in batches.items()
    ]
    heads = (
        "batch",
        "CPU s of a step",
        "of one that measures",
        "more, median of turns (range)",
        "of a run's training",
    )
    most = max(each["of_a_run"] for each in batches.values())
    kept = "kept" if most <= figures["most"] else "**not kept**"
    return [
        table(heads, rows),
        "",
        f"Promise: at most {figures['most']:.0%} of the CPU time of a run's training: {kept} ({most:.2%}).",
    ]


def _learning_verdicts(figures: Figures) -> list[str]:
    rows = [
        (
            each["case"],
            f"{each['seed']}",
            ", ".join(each["at_the_end"]) or "the batches teach",
            "missed" if each["missed"] else "",
            ", ".join(each["false"]),
            f"{each['verdicts_with_a_false_alarm']} of {each['verdicts']}",
        )
        for each in figures["rows"]
    ]
    heads = (
        "training",
        "seed",
        "verdict at its end",
        "missed",
        "false alarm at its end",
        "verdicts with a false alarm",
    )
    return [table(heads, rows)]


REPORTS: Mapping[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "learning": (LEARNING, _learning),
    "learning_arms": (ARMS, _learning_arms),
    "learning_verdicts": (VERDICTS, _learning_verdicts),
    "signal_cost": (SIGNAL_COST, _signal_cost),
    "staleness": (STALENESS, _staleness),
}
