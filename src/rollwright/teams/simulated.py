"""Simulated player of a team: answers for every agent in the agent's format, without a model.

Always true: as for every player, random draws depend on the prompt's key alone. So the answers of a team do not depend on
other rollouts or on how its calls are scheduled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from rollwright.engines.base import Playable, Prompt, Sampling, ToolSpec
from rollwright.engines.rendering.bytes import written_call
from rollwright.errors import ConfigError
from rollwright.rng import draw_pair
from rollwright.simulation.lengths import Lengths, filler_text
from rollwright.simulation.players import Choice, SkilledPlayer, draw_key
from rollwright.teams.agent import TeamAgent
from rollwright.teams.context import FRAGMENT_BEGINS
from rollwright.teams.flows import Route
from rollwright.teams.parsing import Verdict
from rollwright.teams.team import Team

UNKNOWN = "unknown"
"""Answer of an agent that does not find the best action."""

CALLS_A_TOOL = 0.5
"""Probability that an agent with tools calls one instead of answering: on average one tool call for each answer."""


@dataclass(frozen=True)
class SimulatedTeam(SkilledPlayer):
    """Plays the best action with probability `skill`; agents that judge approve with probability `approval`.

    If `approval` is `None`, a verdict is the right one with probability `skill`.
    """

    agents: Mapping[str, TeamAgent] = field(default_factory=dict)
    """Agents by id."""
    approval: float | None = 0.5
    lengths: Mapping[str, Lengths] = field(default_factory=dict)
    """Distribution of the completion length by agent id; an agent without one writes its answer alone."""
    leads_to: Mapping[str, TeamAgent] = field(default_factory=dict)
    """For the router of a `Route`, by id: the agent that acts on its approval."""
    name: ClassVar[str] = "rehearsal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.approval is not None and not 0 <= self.approval <= 1:
            raise ConfigError(f"approval: {self.approval} is not a probability; accepted: 0 to 1")

    @classmethod
    def of(
        cls,
        *teams: Team,
        skill: float = 0.5,
        approval: float | None = 0.5,
        lengths: Mapping[str, Lengths] | None = None,
    ) -> "SimulatedTeam":
        """The player of these teams."""
        agents = {team.agent_id(name): agent for team in teams for name, agent in team.agents.items()}
        leads_to = {
            team.agent_id(team.flow.router): team.agents[team.flow.approved]
            for team in teams
            if isinstance(team.flow, Route)
        }
        return cls(skill, agents, approval, lengths or {}, leads_to)

    def play(self, prompt: Prompt, sampling: Sampling) -> Choice:
        who = str(prompt.key[-2])  # a session puts the agent id there
        agent = self.agents.get(who)
        answer = (
            super().play(prompt, sampling) if agent is None else self._answer(who, agent, prompt, sampling)
        )
        if who not in self.lengths:
            return answer
        length = self.lengths[who].quantile(draw_pair(*draw_key(prompt, sampling), "length").share)
        return Choice(filler_text(max(0, length - len(answer.text))) + answer.text, answer.logprob)

    def _answer(self, who: str, agent: TeamAgent, prompt: Prompt, sampling: Sampling) -> Choice:
        share = draw_pair(*draw_key(prompt, sampling), "player").share
        if agent.specs and (drawn := draw_pair(*draw_key(prompt, sampling), "tool").share) < CALLS_A_TOOL:
            spec = agent.specs[int(drawn / CALLS_A_TOOL * len(agent.specs))]
            return Choice(written_call(spec.name, _arguments(spec, prompt.env)), 0.0)
        if agent.verdict is not None:
            return Choice(agent.verdict.write(self._verdict(who, prompt, share)), 0.0)
        if not agent.reading.tags:
            return super().play(prompt, sampling)
        env = prompt.env
        best = env.best_action() if env is not None and share < self.skill else None
        if env is None or best is None:
            return Choice(agent.reading.write(UNKNOWN), 0.0)
        written = env.answer(best)
        fits = agent.reading.write(written, tagged=True)
        return Choice(fits if agent.reading.read(fits).valid else agent.reading.write(best), 0.0)

    def _verdict(self, who: str, prompt: Prompt, share: float) -> Verdict:
        if self.approval is not None:
            return Verdict.APPROVE if share < self.approval else Verdict.REJECT
        approves = self._should_approve(who, prompt)
        return Verdict.APPROVE if approves == (share < self.skill) else Verdict.REJECT

    def _should_approve(self, who: str, prompt: Prompt) -> bool:
        """Whether the best action is one that the approved agent would write, or is contained in the answer under review."""
        best = None if prompt.env is None else prompt.env.best_action()
        if prompt.env is None or best is None:
            return True
        if (next_agent := self.leads_to.get(who)) is not None:
            written = next_agent.reading.write(prompt.env.answer(best), tagged=True)
            return next_agent.reading.read(written).valid
        answer = _latest_answer(prompt)
        return answer is None or best in answer


def _latest_answer(prompt: Prompt) -> str | None:
    """The newest fragment in the prompt; `None` if it contains none."""
    if prompt.ids is None:
        text = prompt.messages[-1].content if prompt.messages else ""
    else:  # ids of the simulated engine are bytes; special tokens are above 255
        text = bytes(each for each in prompt.ids if each < 256).decode(errors="replace")
    _, found, said = text.rpartition(FRAGMENT_BEGINS)
    return said.partition("\n")[0] if found else None


def _arguments(spec: ToolSpec, env: Playable | None) -> dict[str, object]:
    """A value for each required argument of a tool; for strings, the best action if the environment knows it."""
    best = None if env is None else env.best_action()
    made: dict[str, object] = {}
    for name in spec.parameters.get("required", ()):
        about = spec.parameters.get("properties", {}).get(name, {})
        fitting: dict[str, object] = {
            "integer": 1,
            "number": 1.0,
            "boolean": True,
            "array": [],
            "object": {},
        }
        choices = about.get("enum")
        made[name] = choices[0] if choices else fitting.get(about.get("type"), best or UNKNOWN)
    return made
