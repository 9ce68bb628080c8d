"""`rollwright profile`: attributes a run's time to phases, writes a timeline, and advises how to make the run faster."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollwright.cli.condition import say_condition
from rollwright.cli.console import RunArgument, console
from rollwright.cli.tables import title_of
from rollwright.config import RunConfig
from rollwright.errors import RollwrightError, naming
from rollwright.observe.advice import RunSetup
from rollwright.observe.learning_verdict import RecentSignal, judge_learning, recent_signal
from rollwright.observe.played_setup import setup_of, slots_of, store_of
from rollwright.observe.profile import PhaseTally, Profile
from rollwright.observe.timeline import Played, chrome_trace
from rollwright.observe.verdict import BottleneckVerdict, Figures, judge
from rollwright.run.folder import RunReader
from rollwright.run.training_record import read_steps
from rollwright.trajectory import Phase, Timing, Trajectory

TIMELINE = "timeline.json"

DRAWN = 2000
"""Default number of rollouts in a timeline: at about 150 bytes per wait, viewers open the file without delay."""

RECENT = 1000
"""Rollouts in the profile of a running run: enough for a 95th percentile, and computed in a tenth of a second."""


def profile(
    run: RunArgument,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Calls that the engine serves at once, if RUN's settings do not say.",
            show_default=False,
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help=f"Where to write the timeline. Default: {TIMELINE} in RUN.", show_default=False),
    ] = None,
    rollouts: Annotated[int, typer.Option(min=0, help="Rollouts in the timeline, the last ones.")] = DRAWN,
) -> None:
    """Show what RUN's rollouts waited for, and what would make it faster. Writes a timeline, too."""
    reader = RunReader(run)
    found = Profile()
    drawn: deque[Played] = deque(maxlen=rollouts)
    for trajectory in reader.trajectories():
        found.add(trajectory.tag, trajectory.timing)
        if (played := Played.of(trajectory)) is not None:
            drawn.append(played)
    if not found.rollouts:
        raise RollwrightError(f"{run}: no finished rollout has timings, so there is nothing to profile")
    target = timeline or run / TIMELINE
    with naming(target), target.open("w", encoding="utf-8") as file:
        file.writelines(chrome_trace(drawn))
    screen = console()
    setup = setup_of(reader.config, found, store_of(run))
    screen.print(
        report(found, slots or slots_of(reader.config, found), run.name, setup, simulated=reader.simulated)
    )
    if (summary := reader.summary()) is not None:
        spent = summary.get("activity", {}).get("commit_seconds", 0.0)
        screen.print(f"beside that, {spent:,.2f} s went into reporting the ends of attempts to the store")
    if (learning := learning_of(reader)) is not None:
        screen.print(learning)
    screen.print(f"timeline of {len(drawn):,} rollouts: {target}", soft_wrap=True, highlight=False)
    say_condition(reader, screen)


class RecentProfile:
    """Profile of the last rollouts of a running run, printed every `profile_steps` batches."""

    def __init__(self, screen: Console, config: RunConfig, store: str | None = None) -> None:
        """`store`: address of the run's store."""
        self._screen = screen
        self._config = config
        self._store = store
        self._timings: deque[tuple[str, Timing | None]] = deque(maxlen=RECENT)

    def add(self, steps: int, trajectories: Iterable[Trajectory]) -> None:
        """Add the batch number `steps`; prints the profile when it is due."""
        self._timings.extend((each.tag, each.timing) for each in trajectories)
        if steps % self._config.profile_steps == 0 and steps < self._config.max_steps:
            self.print()

    def print(self) -> None:
        found = Profile()
        for tag, timing in self._timings:
            found.add(tag, timing)
        if found.rollouts:
            name = f"the last {found.rollouts:,} rollouts"
            setup = setup_of(self._config, found, self._store)
            self._screen.print(
                report(
                    found, slots_of(self._config, found), name, setup, simulated=self._config.plays_simulated
                )
            )


def report(
    found: Profile, slots: int | None, name: str, setup: RunSetup, *, simulated: bool
) -> RenderableType:
    parts: list[RenderableType] = [_agents(found, name, simulated), _things(found), _sum(found)]
    if found.untimed:
        parts.append(Text(f"{found.untimed:,} rollouts have no timings and are left out", style="yellow"))
    return Group(*parts, _told(judge(Figures.of(found, slots), setup)))


def _agents(found: Profile, name: str, simulated: bool) -> Table:
    """Calls of each agent, and the seconds that it waited for each phase alone."""
    table = Table(
        title=title_of(f"profile of {name}", simulated=simulated),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,  # up to six phases stand beside the figures
    )
    phases = [phase for phase in Phase if phase is not Phase.AGENT and found.seconds(phase) > 0]
    table.add_column("agent", no_wrap=True)
    waited = [f"{'env' if phase is Phase.ENVIRONMENT else phase} s" for phase in phases]  # so that all fit
    for column in ("calls", "tokens", "mean", "p50", "p95", *waited):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found.agents():
        calls = row.calls
        made = (f"{calls.count:,}", f"{calls.tokens:,}", *_lengths(calls)) if calls.count else ("",) * 5
        table.add_row(row.agent, *made, *(f"{row.waited[phase]:,.2f}" for phase in phases))
    return table


def _things(found: Profile) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("waited for", "which"):
        table.add_column(column, no_wrap=True)
    for column in ("count", "mean", "p50", "p95", "alone s", "of wall"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found.things():
        tally = row.tally
        table.add_row(
            row.phase,
            row.name,
            f"{tally.count:,}",
            *_lengths(tally),
            f"{tally.alone:,.2f}",
            f"{tally.alone / found.wall if found.wall else 0.0:.1%}",
        )
    return table


def _sum(found: Profile) -> Text:
    """Line with the phases and their sum."""
    parts = [(phase, found.seconds(phase)) for phase in Phase if found.seconds(phase) > 0]
    told = " + ".join(f"{phase} {seconds:,.2f} ({found.share(phase):.0%})" for phase, seconds in parts)
    return Text(f"{found.rollouts:,} rollouts took {found.wall:,.2f} s together = {told}")


def _told(verdict: BottleneckVerdict) -> RenderableType:
    parts: list[RenderableType] = [Text.assemble("\nverdict: ", (str(verdict), "bold"))]
    for finding in verdict.findings:
        parts.append(Padding(Text(f"{finding.cause}: {finding.because}"), (0, 0, 0, 2)))
        parts.append(Padding(Text(f"→ {finding.advice}", style="dim"), (0, 0, 0, 4)))
    return Group(*parts)


def learning_of(reader: RunReader) -> RenderableType | None:
    """The verdict on learning; `None` for a run that did not train, or left no figures of it."""
    steps = [each for each in read_steps(reader.path) if "silent_groups" in each]
    if not steps:
        return None
    findings = judge_learning(steps, reader.config)
    told = " and ".join(each.what for each in findings) or "the batches teach"
    parts: list[RenderableType] = [Text.assemble("verdict on learning: ", (told, "bold"))]
    for each in findings:
        parts.append(Padding(Text(f"{each.what}: {each.because}"), (0, 0, 0, 2)))
        parts.append(Padding(Text(f"→ {each.advice}", style="dim"), (0, 0, 0, 4)))
    if (signal := recent_signal(steps)) is not None:
        parts.append(Text(f"gradient: {_told_signal(signal)}"))
    return Group(*parts)


def _told_signal(found: RecentSignal) -> str:
    needed = found.tokens_needed
    equal = (
        "no signal above it" if needed is None else f"as much noise as signal at {needed:,.0f} trained tokens"
    )
    error = "" if found.measured < 2 else f" ± {found.error:.1g}"
    return (
        f"{equal}; a batch has {found.tokens:,.0f}, and {found.ratio:.2g}{error} times as much signal as noise; by the halves of "
        f"{found.measured} batches"
    )


def _lengths(tally: PhaseTally) -> tuple[str, ...]:
    """Mean, median and 95th percentile."""
    return tuple(map(_duration, (tally.mean, tally.percentile(0.5), tally.percentile(0.95))))


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
