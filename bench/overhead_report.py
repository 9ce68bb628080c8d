"""From measured cells to figures, a table and verdicts: pure code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from overhead_episode import TURNS, Cell

MOST_OVER_LIMIT = 2.0
"""CPU per turn against the bare loop: a trajectory, its counters and its commit may cost one more request."""

LEAST_UNDER_PEER = 10.0
"""CPU per turn of the peer against ours."""

MOST_GROWTH = 1.3
"""CPU per turn at the highest concurrency against the lowest: what still counts as flat."""


@dataclass(frozen=True)
class Figures:
    """One arm at one concurrency: medians over its repeats."""

    arm: str
    library: str
    concurrent: int
    repeats: int
    rollouts: int
    """In each repeat."""
    rollouts_per_second: float
    cpu_ms_per_turn: float
    p50: float
    p99: float


@dataclass(frozen=True)
class Target:
    promise: str
    measured: str
    met: bool


@dataclass(frozen=True)
class Roles:
    """Which arms are compared."""

    ours: str
    durable: str
    """Ours with every turn on disk before it is acted on."""
    limit: str
    peer: str


Figured = Mapping[tuple[str, int], Figures]
"""By arm and concurrency; a cell that could not be measured is not there."""


def summarize(arm: str, cells: Sequence[Cell]) -> Figures:
    return Figures(
        arm=arm,
        library=cells[0].library,
        concurrent=cells[0].concurrent,
        repeats=len(cells),
        rollouts=cells[0].rollouts,
        rollouts_per_second=median(cell.rollouts_per_second for cell in cells),
        cpu_ms_per_turn=median(cell.cpu_ms_per_turn for cell in cells),
        p50=median(cell.p50 for cell in cells),
        p99=median(cell.p99 for cell in cells),
    )


def judge(figures: Figured, roles: Roles) -> list[Target]:
    """Each target at its worst concurrency; a target whose arms were not all measured is left out."""
    over, under = _ratios(figures, roles.ours, roles.limit), _ratios(figures, roles.peer, roles.ours)
    targets = []
    promise = f"at most {MOST_OVER_LIMIT:g}× {roles.limit}"
    for said, ratios in (
        (promise, over),
        (f"{promise} with every turn on disk", _ratios(figures, roles.durable, roles.limit)),
    ):
        if ratios:
            at, worst = max(ratios.items(), key=lambda item: item[1])
            targets.append(Target(said, f"{worst:.2f}× at {at}", worst <= MOST_OVER_LIMIT))
    if under:
        at, worst = min(under.items(), key=lambda item: item[1])
        measured = f"{worst:.1f}× at {at}"
        targets.append(
            Target(
                f"at least {LEAST_UNDER_PEER:g}× less than {roles.peer}", measured, worst >= LEAST_UNDER_PEER
            )
        )
    if len(over) > 1:
        low, high = min(over), max(over)
        growth = {
            arm: figures[arm, high].cpu_ms_per_turn / figures[arm, low].cpu_ms_per_turn
            for arm in (roles.ours, roles.limit)
        }
        measured = f"{growth[roles.ours]:.2f}× ({roles.limit}: {growth[roles.limit]:.2f}×)"
        promise = f"flat from {low} to {high}: at most {MOST_GROWTH:g}×"
        targets.append(Target(promise, measured, growth[roles.ours] <= MOST_GROWTH))
    return targets


def _ratios(figures: Figured, above: str, below: str) -> dict[int, float]:
    """CPU per turn of one arm over another's, by concurrency, where both were measured."""
    levels = [concurrent for arm, concurrent in figures if arm == above and (below, concurrent) in figures]
    return {
        each: figures[above, each].cpu_ms_per_turn / figures[below, each].cpu_ms_per_turn for each in levels
    }


_COLUMNS = ("at once", "arm", "rollouts", "per s", "ms/turn", "p50 s", "p99 s", "×limit", "×ours")


def table(figures: Figured, roles: Roles) -> Table:
    libraries = ", ".join(dict.fromkeys(each.library for each in figures.values()))
    shown = Table(
        title=f"Overhead of a {TURNS}-turn rollout, one client process",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption=f"ms/turn: CPU, user and system; rollouts: in each repeat × repeats; {libraries}",
    )
    for column in _COLUMNS:
        shown.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    last = None
    for (arm, concurrent), each in sorted(figures.items(), key=lambda item: item[0][1]):
        if last not in (None, concurrent):
            shown.add_section()
        shown.add_row(
            "" if concurrent == last else str(concurrent),
            arm,
            f"{each.rollouts}×{each.repeats}",
            f"{each.rollouts_per_second:,.0f}",
            f"{each.cpu_ms_per_turn:.3f}",
            f"{each.p50:.2f}",
            f"{each.p99:.2f}",
            _against(each, figures.get((roles.limit, concurrent))),
            _against(each, figures.get((roles.ours, concurrent))),
        )
        last = concurrent
    return shown


def _against(each: Figures, base: Figures | None) -> str:
    return (
        "" if base is None or base.arm == each.arm else f"{each.cpu_ms_per_turn / base.cpu_ms_per_turn:.2f}"
    )
