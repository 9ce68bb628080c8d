"""How the figures of the benchmarks of trees are shown."""

from collections.abc import Callable, Mapping
from typing import Any

from markdown_tables import table

Figures = Mapping[str, Any]

TREE = """What a tree gives for the same tokens: groups of eight leaves, as chains or as trees, until the budget is sampled,
with a player that takes the best action with a given probability. Mixed groups have both successes and failures; a
sample is a row with an advantage that is not zero, for each 1,000 sampled tokens. On a virtual clock with keyed draws,
so the figures are exact."""

TREE_SIGNAL = """Signal to noise of the gradient per sampled token, against the exact gradient of small games: the tokens that groups
of eight chains need until the noise is as large as the gradient, over those of the shape. *Silent*: groups without a gradient.
Shapes are grown by the branch policies and valued by the advantages of the package; κ is `kappa`."""

TREE_PREFIX = """What an engine's prefix cache saves, for chains and for trees: groups of eight leaves of equal length, played by
the engine in this process with random weights, with its prefix cache and without; without it, calls that are served at
the same time still share what they have in common. Through the model went what was not at hand. The processor time is of a
busy machine."""

TREE_PREFIX_VLLM = """The same on a served engine: SmolLM2 on vLLM (CPU build, float32), one server with its prefix cache and one
without, groups of eight leaves of four turns and answers of equal length. Engine time is the processor time of the
process that runs the model; calls, tokens and hits are the server's own counters. Each arm begins with an empty cache;
arms take turns, and the figures are sums over the rounds. Not part of `make bench`, because it installs vLLM."""


def _tree(figures: Figures) -> list[str]:
    rows = [
        (
            f"`{each['tag']}`, {each['skill']}",
            each["arm"],
            f"{each['leaves_per_group']:.1f}",
            f"{each['tokens_per_leaf']:.0f}",
            f"{each['tokens_to_chain']:.2f}×",
            f"{each['turns_per_leaf']:.2f}",
            f"{each['arithmetic']:.2f}",
            f"{100 * each['mixed']:.0f} %",
            f"{each['samples_per_1000']:.2f}",
            f"{each['samples_to_chain']:.2f}×",
        )
        for each in figures["arms"]
    ]
    heads = (
        "game, skill",
        "arm",
        "leaves",
        "tokens per leaf",
        "to chain",
        "turns per leaf",
        "by arithmetic",
        "mixed groups",
        "samples per 1,000 tokens",
        "to chain",
    )
    return [table(heads, rows)]


def _tree_signal(figures: Figures) -> list[str]:
    rows = [
        (
            f"{each['game']}, {each['solved']:.1%}",
            each["shape"],
            f"{each['tokens']:.0f}",
            f"{each['silent']:.0%}",
            f"{each['gain']:.2f}",
        )
        for each in figures["arms"]
    ]
    return [table(("game, solved", "shape", "tokens of a group", "silent", "gain"), rows)]


def _tree_prefix(figures: Figures) -> list[str]:
    rows = [
        (
            each["shape"],
            "on" if each["cache"] else "off",
            f"{each['leaves']}",
            f"{each['calls']}",
            f"{each['prompt_tokens']:,}",
            f"{each['sampled_tokens']:,}",
            f"{each['fed_tokens']:,}",
            f"{each['fed_per_leaf']:,.0f}",
            f"{each['cpu_seconds']:.1f}",
        )
        for each in figures["arms"]
    ]
    heads = (
        "shape",
        "prefix cache",
        "leaves",
        "calls",
        "tokens of prompts",
        "sampled tokens",
        "through the model",
        "for each leaf",
        "CPU s",
    )
    return [table(heads, rows)]


def _tree_prefix_vllm(figures: Figures) -> list[str]:
    rows = [
        (
            each["shape"],
            "on" if each["cache"] else "off",
            f"{each['leaves']}",
            f"{each['calls']}",
            f"{each['prompt_tokens']:,}",
            f"{each['cached_tokens']:,}",
            f"{each['sampled_tokens']:,}",
            f"{each['cpu_seconds']:.1f}",
            f"{each['cpu_per_leaf']:.2f}",
        )
        for each in figures["arms"]
    ]
    heads = (
        "shape",
        "prefix cache",
        "leaves",
        "calls",
        "tokens of prompts",
        "found in the cache",
        "sampled tokens",
        "engine CPU s",
        "for each leaf",
    )
    saved, shared = figures["cached_to_uncached"], figures["tree_to_chain"]
    return [
        table(heads, rows),
        "",
        f"The cache takes the engine time of a leaf to {saved['chain']:.2f}× for chains and to {saved['tree']:.2f}× for "
        f"trees. With it a tree's leaf takes {shared['cache']:.2f}× a chain's, without it {shared['no_cache']:.2f}×.",
    ]


REPORTS: Mapping[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "tree": (TREE, _tree),
    "tree_signal": (TREE_SIGNAL, _tree_signal),
    "tree_prefix": (TREE_PREFIX, _tree_prefix),
    "tree_prefix_vllm": (TREE_PREFIX_VLLM, _tree_prefix_vllm),
}
