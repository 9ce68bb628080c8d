"""The verdict of a profile: the bottleneck of a run, by its own figures, and how to remove it. Pure.

If the engine was full, only the engine matters, because other rollouts fill its slots while some wait for something else.
Otherwise every phase with a large share of the rollouts' time is a bottleneck, and too few concurrent rollouts are another.
Several bottlenecks are ordered by weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollwright.observe.advice import Cause, RunSetup, advise
from rollwright.observe.profile import Profile
from rollwright.trajectory import Phase

FULL = 0.9
"""Occupancy from which an engine counts as full: the start and the end of any run lose the rest."""

STRETCHED = 1.5
"""Stretch from which an engine with unknown slots counts as full: its calls queue or share its speed. A smaller stretch can
come from the spread of prompt lengths alone."""

A_GOOD_PART = 0.25
"""Share of the rollouts' time from which a phase is named: removing a smaller one gains at most a third in speed."""

QUIET_ENOUGH = 0.05
"""Share of quiet time from which `stretch` shows the speed of an unloaded engine."""


WAITS: Mapping[Cause, tuple[Phase, ...]] = {
    Cause.ENVIRONMENT: (Phase.ENVIRONMENT,),
    Cause.TOOL: (Phase.TOOL, Phase.LOCK),
    Cause.TRANSPORT: (Phase.TRANSPORT,),
    Cause.STORE: (Phase.STORE,),
    Cause.AGENT: (Phase.AGENT,),
}
"""Phases whose time indicates a cause."""


@dataclass(frozen=True)
class Figures:
    """Figures that a verdict is based on."""

    shares: Mapping[Phase, float]
    """Shares of the rollouts' wall time, by phase."""
    rollouts: float
    """Mean number of concurrent rollouts."""
    most_rollouts: int
    calls: float
    """Mean number of concurrent calls at the engine; a tree or a team may have several for one rollout."""
    most_calls: int
    slots: int | None
    """Concurrent calls that the engine serves, all replicas together; `None` if unknown."""
    occupancy: float | None
    """Share of the slots that were busy; `None` without `slots`."""
    in_line: float | None
    """Share of the waiting for the engine that was spent in its queue; `None` without `slots`."""
    stretch: float | None
    """Mean time per token over that of the fastest tenth."""
    seen_quiet: float
    """Share of the time with few calls, without which `stretch` says nothing."""

    @classmethod
    def of(cls, profile: Profile, slots: int | None) -> "Figures":
        load = profile.load()
        return cls(
            shares={phase: profile.share(phase) for phase in Phase},
            rollouts=load.rollouts,
            most_rollouts=load.most_rollouts,
            calls=load.calls,
            most_calls=load.most_calls,
            slots=slots,
            occupancy=None if slots is None else load.occupancy(slots),
            in_line=None if slots is None else load.in_line(slots),
            stretch=load.stretch,
            seen_quiet=load.seen_quiet,
        )

    def share(self, cause: Cause) -> float:
        return sum(self.shares.get(phase, 0.0) for phase in WAITS[cause])


@dataclass(frozen=True)
class Bottleneck:
    """One cause, with its evidence and the advice against it."""

    cause: Cause
    because: str
    advice: str


@dataclass(frozen=True)
class BottleneckVerdict:
    """All bottlenecks of a run."""

    findings: tuple[Bottleneck, ...]
    """By falling weight; never empty."""

    @property
    def causes(self) -> tuple[Cause, ...]:
        return tuple(finding.cause for finding in self.findings)

    def __str__(self) -> str:
        return " and ".join(self.causes)


def judge(figures: Figures, setup: RunSetup) -> BottleneckVerdict:
    """Find the bottlenecks; `setup` keeps the advice from repeating present settings."""
    setup = replace(setup, at_once=figures.most_rollouts)
    if _full(figures):
        return BottleneckVerdict((_finding(Cause.ENGINE, figures, setup),))
    heaviest = max(WAITS, key=figures.share)
    mostly_engine = figures.shares.get(Phase.ENGINE, 0.0) >= figures.share(heaviest)
    named = [cause for cause in WAITS if figures.share(cause) >= A_GOOD_PART]
    named.sort(key=figures.share, reverse=True)
    if figures.slots is not None and max(figures.most_rollouts, figures.most_calls) < figures.slots:
        named.insert(0 if mostly_engine else len(named), Cause.BATCH)
    if not named:
        named = [_of_engine(figures) if mostly_engine else heaviest]
    return BottleneckVerdict(tuple(_finding(cause, figures, setup) for cause in named))


def _full(figures: Figures) -> bool:
    if figures.occupancy is not None:
        return figures.occupancy >= FULL
    return figures.stretch is not None and figures.stretch >= STRETCHED


def _of_engine(figures: Figures) -> Cause:
    """Cause if the rollouts wait for an engine that is not known to be full."""
    if figures.slots is not None:
        return Cause.STRAGGLERS if figures.rollouts < figures.slots else Cause.ENGINE
    return Cause.BATCH if figures.seen_quiet >= QUIET_ENOUGH else Cause.ENGINE_OR_BATCH


def _finding(cause: Cause, figures: Figures, setup: RunSetup) -> Bottleneck:
    return Bottleneck(cause, f"{_weight(cause, figures)}; {_engine(figures)}", advise(cause, setup))


def _weight(cause: Cause, figures: Figures) -> str:
    if cause in WAITS:
        phases = [phase for phase in WAITS[cause] if figures.shares.get(phase, 0.0) > 0] or [WAITS[cause][0]]
        parts = [f"{phase} {figures.shares.get(phase, 0.0):.0%}" for phase in phases]
        return f"{' + '.join(parts)} of the rollouts' time"
    if cause in (Cause.BATCH, Cause.STRAGGLERS) and figures.slots is not None:
        return (
            f"{figures.most_rollouts} rollouts at once at most and {figures.rollouts:.1f} in the mean, "
            f"for {figures.slots} slots"
        )
    return f"engine {figures.shares.get(Phase.ENGINE, 0.0):.0%} of the rollouts' time"


def _engine(figures: Figures) -> str:
    """Load of the engine, for users."""
    if figures.occupancy is not None:
        return (
            f"{figures.occupancy:.0%} of {figures.slots} slots busy, "
            f"{figures.in_line or 0.0:.0%} of the waiting for the engine in its queue"
        )
    said = f"{figures.calls:.1f} calls at the engine at once, in the mean"
    if figures.stretch is None:
        return said
    return f"{said}; a token took {figures.stretch:.1f} times as long as the quickest tenth"
