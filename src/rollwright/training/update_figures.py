"""Figures of a step's updates, from the tallies of their tokens, and advice when steps are skipped. Pure."""

from collections.abc import Sequence
from typing import Any

import torch

from rollwright.training.gradients import TokenTally
from rollwright.training.micro_batches import PackedRow
from rollwright.training.report import Skip, StepReport


def staleness(packed: Sequence[PackedRow], version: int) -> dict[int, int]:
    """Number of tokens by the age of the version that sampled them."""
    if not packed:
        return {}
    ages, counts = torch.unique(version - torch.cat([row.versions for row in packed]), return_counts=True)
    return dict(zip(ages.tolist(), counts.tolist(), strict=True))


def update_figures(tallies: Sequence[TokenTally], norms: Sequence[float]) -> dict[str, Any]:
    """The fields of a report that concern the updates."""
    tokens = sum(tally.tokens for tally in tallies)
    computed, padded = sum(tally.computed for tally in tallies), sum(tally.padded for tally in tallies)

    def mean(name: str) -> float:
        return sum(tally.sums.get(name, 0.0) for tally in tallies) / max(tokens, 1)

    first = tallies[0]
    return {
        "loss": sum(tally.loss for tally in tallies) / len(tallies),
        "entropy": mean("entropy"),
        "ratio": mean("ratio"),
        "ratio_max": max(tally.ratio_max for tally in tallies),
        "clip_share": mean("clipped"),
        "divergence": mean("divergence") if "divergence" in first.sums else None,
        "value_loss": mean("value_loss") if "value_loss" in first.sums else None,
        "value_clip_share": mean("value_clipped") if "value_clipped" in first.sums else None,
        "gap": first.mean("gap"),
        "gap_max": first.gap_max,
        "gap_k3": first.mean("gap_k3"),
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "computed_tokens": computed,
        "shared_tokens": sum(tally.shared for tally in tallies),
        "padding_share": 1 - computed / padded if padded else 0.0,
        "micro_batches": sum(tally.micro_batches for tally in tallies),
        "rank_imbalance": sum(tally.imbalance for tally in tallies) / len(tallies),
    }


def skip_advice(why: Skip, report: StepReport, times: int) -> str:
    """What to change after steps that were skipped in a row."""
    if why is Skip.NOT_FINITE:
        return (
            f"{why}, {times} steps in a row, after version {report.version}; "
            "set learning_rate or max_grad_norm lower, or use float32"
        )
    return (
        f"{why} of {report.gap:.3g} nats, {times} steps in a row, after version {report.version}; "
        "give engine and trainer the same weights, temperature and tokenizer, top_p 1, or set max_logprob_gap higher"
    )
