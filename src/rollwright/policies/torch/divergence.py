"""How far two generations of the same call differ: what the fast mode is allowed, and is measured by."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollwright.policies.base import Generation


@dataclass(frozen=True)
class Divergence:
    """Of a list of calls, generated twice."""

    calls: int
    diverged: int
    """Calls with another id somewhere; from there on they have nothing in common that could be compared."""
    tokens: int
    """Compared: those of both up to where they differ."""
    largest_gap: float
    """In log-probability, over the tokens that are the same."""

    @property
    def share(self) -> float:
        return self.diverged / self.calls if self.calls else 0.0


def divergence(first: Sequence[Generation], second: Sequence[Generation]) -> Divergence:
    """Of two lists of generations, call by call."""
    diverged = tokens = 0
    largest = 0.0
    for one, other in zip(first, second, strict=True):
        alike = same_start(one.sampled_ids, other.sampled_ids)
        diverged += one.sampled_ids != other.sampled_ids
        tokens += alike
        gaps = (abs(a - b) for a, b in zip(one.logprobs[:alike], other.logprobs[:alike], strict=True))
        largest = max(largest, *gaps, 0.0)
    return Divergence(len(first), diverged, tokens, largest)


def same_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences have in common from their start."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
