"""The verdict: what keeps a run from being faster, out of its own figures, and what to change.

A pure decision. First question: was the engine full? Then nothing but the engine helps, whatever else the rollouts wait
for, because others fill its slots meanwhile. If it was not, whatever took a good part of the rollouts' time is named,
and too few rollouts at once are named beside it. Several causes together are a combination, the weightiest first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollwright.observe.advice import Cause, RunSetup, advise
from rollwright.observe.profile import Profile
from rollwright.trajectory import Phase

FULL = 0.9
"""Occupancy from which an engine counts as full: the rest is lost at the beginning and the end of any run."""

STRETCHED = 1.5
"""Where nobody knows the slots: an engine whose tokens take that much longer than its quickest has a line or shares
its speed. Below, the spread of prompt lengths alone can be the reason."""

A_GOOD_PART = 0.25
"""Of the rollouts' time: what takes less can gain at most a third in speed by vanishing, and is not named."""

QUIET_ENOUGH = 0.05
"""Of the time with calls: less has not shown how quick the engine is when it is not busy."""


WAITS: Mapping[Cause, tuple[Phase, ...]] = {
    Cause.ENVIRONMENT: (Phase.ENVIRONMENT,),
    Cause.TOOL: (Phase.TOOL, Phase.LOCK),
    Cause.TRANSPORT: (Phase.TRANSPORT,),
    Cause.STORE: (Phase.STORE,),
    Cause.AGENT: (Phase.AGENT,),
}
"""The phases whose time speaks for a cause."""


@dataclass(frozen=True)
class Figures:
    """What a verdict rests on."""

    shares: Mapping[Phase, float]
    """Of the rollouts' wall time."""
    rollouts: float
    """At once, in the mean."""
    most_rollouts: int
    calls: float
    """At the engine at once, in the mean; a tree or a team may have several for one rollout."""
    most_calls: int
    slots: int | None
    """Calls that the engine serves at once, all replicas together; `None`: nobody knows."""
    occupancy: float | None
    """Share of the slots that were busy; `None` without `slots`."""
    in_line: float | None
    """Share of the waiting for the engine that was spent in its line; `None` without `slots`."""
    stretch: float | None
    """How many times as long a token took as one of the quickest tenth."""
    seen_quiet: float
    """Share of the time with calls in which there were few: what makes `stretch` mean something."""

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
class ProfileFinding:
    """One cause, with the figures that speak for it and what to change."""

    cause: Cause
    because: str
    advice: str


@dataclass(frozen=True)
class RunVerdict:
    findings: tuple[ProfileFinding, ...]
    """The weightiest first; never empty."""

    @property
    def causes(self) -> tuple[Cause, ...]:
        return tuple(finding.cause for finding in self.findings)

    def __str__(self) -> str:
        return " and ".join(self.causes)


def judge(figures: Figures, setup: RunSetup) -> RunVerdict:
    """`setup`: of the run, so that nothing is recommended that it has already."""
    setup = replace(setup, at_once=figures.most_rollouts)
    if _full(figures):
        return RunVerdict((_finding(Cause.ENGINE, figures, setup),))
    heaviest = max(WAITS, key=figures.share)
    mostly_engine = figures.shares.get(Phase.ENGINE, 0.0) >= figures.share(heaviest)
    named = [cause for cause in WAITS if figures.share(cause) >= A_GOOD_PART]
    named.sort(key=figures.share, reverse=True)
    if figures.slots is not None and max(figures.most_rollouts, figures.most_calls) < figures.slots:
        named.insert(0 if mostly_engine else len(named), Cause.BATCH)
    if not named:
        named = [_of_engine(figures) if mostly_engine else heaviest]
    return RunVerdict(tuple(_finding(cause, figures, setup) for cause in named))


def _full(figures: Figures) -> bool:
    if figures.occupancy is not None:
        return figures.occupancy >= FULL
    return figures.stretch is not None and figures.stretch >= STRETCHED


def _of_engine(figures: Figures) -> Cause:
    """What it means that rollouts wait for an engine that is not known to be full."""
    if figures.slots is not None:
        return Cause.STRAGGLERS if figures.rollouts < figures.slots else Cause.ENGINE
    return Cause.BATCH if figures.seen_quiet >= QUIET_ENOUGH else Cause.ENGINE_OR_BATCH


def _finding(cause: Cause, figures: Figures, setup: RunSetup) -> ProfileFinding:
    return ProfileFinding(cause, f"{_weight(cause, figures)}; {_engine(figures)}", advise(cause, setup))


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
    """How busy the engine was."""
    if figures.occupancy is not None:
        return (
            f"{figures.occupancy:.0%} of {figures.slots} slots busy, "
            f"{figures.in_line or 0.0:.0%} of the waiting for the engine in its line"
        )
    said = f"{figures.calls:.1f} calls at the engine at once, in the mean"
    if figures.stretch is None:
        return said
    return f"{said}; a token took {figures.stretch:.1f} times as long as the quickest tenth"
