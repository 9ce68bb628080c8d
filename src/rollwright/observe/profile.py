"""Profile of a run, from the timings in its trajectories: who waited how long for what.

Invariants: the exclusive seconds of all phases sum to the wall time of all rollouts; `attribution` decides between waits at
the same time. Counts, means and percentiles are of the waits themselves, which may overlap. Trajectories without a timing
are counted and left out. Failed attempts leave no trajectory, and so no timing.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollwright.observe.attribution import exclusive
from rollwright.observe.load import BusySpan, EngineCall, Load, measure
from rollwright.trajectory import Phase, Timing, Trajectory

NOBODY = "–"
"""Agent name for waits of the episode as a whole."""


@dataclass
class PhaseTally:
    """Waits of one kind."""

    lengths: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds of each wait."""
    alone: float = 0.0
    """Exclusive seconds."""
    tokens: int = 0

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0

    def percentile(self, share: float) -> float:
        """Shortest length, in seconds, that at least this share of the waits does not exceed."""
        if not self.lengths:
            return 0.0
        ranked = sorted(self.lengths)
        return ranked[max(-(-int(share * 100) * len(ranked) // 100) - 1, 0)]


@dataclass(frozen=True)
class AgentRow:
    """Generations and exclusive waiting times of one agent."""

    agent: str
    calls: PhaseTally
    waited: Mapping[Phase, float]
    """Exclusive seconds by phase."""


@dataclass(frozen=True)
class ThingRow:
    """One tool, one method of an environment, or one use of the store."""

    phase: Phase
    name: str
    tally: PhaseTally


class Profile:
    """Sums of the timings of many rollouts."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.untimed = 0
        """Trajectories without a timing."""
        self.processes: set[int] = set()
        """Ids of the processes that played."""
        self.wall = 0.0
        """Wall time in seconds, summed over the rollouts."""
        self._phases: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
        self._tallies: dict[tuple[Phase, str, str], PhaseTally] = defaultdict(PhaseTally)
        """Waits by phase, agent and name; a name of an environment's method is prefixed with the tag."""
        self._spans: list[BusySpan] = []
        self._calls: list[EngineCall] = []

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> "Profile":
        profile = cls()
        for trajectory in trajectories:
            profile.add(trajectory.tag, trajectory.timing)
        return profile

    def add(self, tag: str, timing: Timing | None) -> None:
        if timing is None:
            self.untimed += 1
            return
        self.rollouts += 1
        self.wall += timing.wall
        self.processes.add(timing.process)
        began = timing.started
        self._spans.append(BusySpan(began, began + timing.wall))
        for wait in timing.waits:
            name = f"{tag} {wait.name}" if wait.phase is Phase.ENVIRONMENT else wait.name
            tally = self._tallies[wait.phase, wait.agent, name]
            tally.lengths.append(wait.seconds)
            tally.tokens += wait.tokens
            if wait.phase is Phase.ENGINE:
                self._calls.append(EngineCall(began + wait.start, began + wait.stop, wait.tokens))
        for start, stop, owner in exclusive(timing):
            if owner is None:
                self._phases[Phase.AGENT] += stop - start
                continue
            name = f"{tag} {owner.name}" if owner.phase is Phase.ENVIRONMENT else owner.name
            self._phases[owner.phase] += stop - start
            self._tallies[owner.phase, owner.agent, name].alone += stop - start

    def seconds(self, phase: Phase) -> float:
        """Exclusive seconds of this phase, summed over the rollouts."""
        return self._phases[phase]

    def share(self, phase: Phase) -> float:
        """Share of this phase in the wall time of all rollouts."""
        return self._phases[phase] / self.wall if self.wall else 0.0

    def load(self) -> Load:
        return measure(self._spans, self._calls)

    def agents(self) -> list[AgentRow]:
        """One row per agent by falling waiting time; waits of whole episodes come last."""
        rows = [
            AgentRow(agent or NOBODY, self._sum(Phase.ENGINE, agent), self._waited(agent))
            for agent in {agent for _, agent, _ in self._tallies}
        ]
        return sorted(rows, key=lambda row: (row.agent == NOBODY, -sum(row.waited.values()), row.agent))

    def things(self) -> list[ThingRow]:
        """One row per tool, environment method and store call over all agents, in the order of the phases."""
        kinds = {(phase, name) for phase, _, name in self._tallies if phase is not Phase.ENGINE}
        order: Sequence[Phase] = list(Phase)
        rows = [ThingRow(phase, name, self._sum(phase, None, name)) for phase, name in kinds]
        return sorted(rows, key=lambda row: (order.index(row.phase), -row.tally.alone, row.name))

    def _waited(self, agent: str) -> dict[Phase, float]:
        return {phase: self._sum(phase, agent).alone for phase in Phase if phase is not Phase.AGENT}

    def _sum(self, phase: Phase, agent: str | None, name: str | None = None) -> PhaseTally:
        """Sum over all agents or names if none is given."""
        total = PhaseTally()
        for (its_phase, its_agent, its_name), tally in self._tallies.items():
            if its_phase is phase and agent in (None, its_agent) and name in (None, its_name):
                total.lengths.extend(tally.lengths)
                total.alone += tally.alone
                total.tokens += tally.tokens
        return total
