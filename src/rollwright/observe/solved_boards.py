"""How many validation levels a training solves before and after, by tag, with intervals that count distinct boards.

Levels are drawn at random, so one board may be drawn for several of them. A model that plays greedily does the same on each,
so such levels tell nothing more: a board counts once, with the share of its levels that were solved, and the interval is that
of so many boards.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollwright.evaluation.intervals import ConfidenceInterval, closed_form
from rollwright.trajectory import Trajectory


@dataclass(frozen=True)
class SolvedBoards:
    """Greedy play on the levels of one tag."""

    tag: str
    levels: int
    boards: int
    """Distinct opening observations."""
    before: float
    """Share of solved boards before training."""
    after: float
    interval: ConfidenceInterval | None
    """95 % interval of `after`; `None` with fewer than two boards."""


def solved_boards(before: Iterable[Trajectory], after: Iterable[Trajectory]) -> list[SolvedBoards]:
    """By tag, in the order in which the tags come; only levels whose success is known in both."""
    first = {(each.tag, each.seed): each for each in before if each.success is not None}
    pairs: dict[str, dict[str, list[tuple[bool, bool]]]] = {}
    for each in after:
        earlier = first.get((each.tag, each.seed))
        if each.success is not None and earlier is not None:
            found = pairs.setdefault(each.tag, {}).setdefault(each.observation, [])
            found.append((bool(earlier.success), each.success))
    return [_of_tag(tag, list(boards.values())) for tag, boards in pairs.items()]


def _of_tag(tag: str, boards: Sequence[Sequence[tuple[bool, bool]]]) -> SolvedBoards:
    before = [sum(early for early, _ in levels) / len(levels) for levels in boards]
    after = [sum(late for _, late in levels) / len(levels) for levels in boards]
    return SolvedBoards(
        tag,
        levels=sum(map(len, boards)),
        boards=len(boards),
        before=sum(before) / len(before),
        after=sum(after) / len(after),
        interval=closed_form(after, share=True) if len(after) > 1 else None,
    )
