"""A team: agents and the flow that calls them, played as one rollout strategy.

Always true: an episode is one coroutine that waits for no other episode. The reward of a step is recorded on the last call
of that step, after all calls that led to the action; a format penalty of the environment on the call that wrote the action.
`Team.play_turns` plays an episode; `Team.act` plays one step, for user-defined loops. `only_agents` selects the agents that
are trained.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import msgspec

from rollwright.agents import OutOfRoom, Phase, Session, bounded
from rollwright.engines.base import Policy
from rollwright.envs.base import Env, Info, Step
from rollwright.errors import ConfigError
from rollwright.rollout.episode import EpisodeSettings, too_old
from rollwright.rollout.filters import stops
from rollwright.teams.agent import TeamAgent, agent_id
from rollwright.teams.flows import Flow
from rollwright.teams.session import Memory, Situation, TeamSession
from rollwright.teams.settings import Performance
from rollwright.tools import ToolContext
from rollwright.trajectory import Boundary, Outcome, StopReason, Trajectory, Turn

OTHER_AGENT = "other agent"
"""`Turn.filtered` of a turn of an agent that another model is trained on."""


def only_agents(trajectory: Trajectory, agents: Collection[str]) -> Trajectory:
    """The same trajectory with the turns of all other agents masked out of the loss. `agents`: ids, `team/agent`.

    Rewards and turns stay, so that advantages are those of the whole team.
    """
    turns = [
        turn
        if turn.agent in agents or turn.filtered is not None
        else msgspec.structs.replace(turn, filtered=OTHER_AGENT)
        for turn in trajectory.turns
    ]
    return msgspec.structs.replace(trajectory, turns=turns)


NOTHING = ""
"""The action of a team whose flow returned no reply."""


@dataclass(frozen=True)
class TeamAction:
    """The action of a team in one step."""

    text: str
    author: Turn | None
    """The call that wrote the action; `None`: the flow returned no reply."""
    calls: tuple[Turn, ...]
    """All recorded calls of the step, in order."""

    def observe(self, session: Session, step: Step) -> Outcome:
        """Records the environment's step: the reward on the last call, the format penalty on the call that wrote the
        action, if there is one. Returns the outcome as the environment gave it."""
        turns = session.trajectory.turns
        last = turns[self.calls[-1].id]
        answered = session.read_step(last, step)
        info: Info = {**step.info}
        if (
            last.outcome is not None
        ):  # recorded by `TeamSession.settle`; the environment judges the author, not the last call
            info["penalty"], info["valid"] = last.outcome.penalty, last.outcome.valid
        session.observe(last, step._replace(info=info))
        if self.author is not None and (outcome := turns[self.author.id].outcome) is not None:
            judged = msgspec.structs.replace(
                outcome,
                penalty=outcome.penalty + answered.penalty,
                valid=outcome.valid and answered.valid,
                action=answered.action,
            )
            turns[self.author.id] = msgspec.structs.replace(turns[self.author.id], outcome=judged)
        return answered


@dataclass(frozen=True)
class Team:
    """Agents and their flow. Immutable: the state of an episode is in `Memory` and the session."""

    name: str
    """Prefix of the agents' names in trajectories and metrics."""
    agents: Mapping[str, TeamAgent]
    flow: Flow
    performance: Performance = field(default_factory=Performance)
    is_greedy: bool = False
    """Whether every agent samples at temperature 0."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ConfigError(f"team name {self.name!r}: accepted is a name without '/'")
        for name, agent in self.agents.items():
            agent.check(f"team {self.name}: agents.{name}")
        for name in getattr(self.flow, "agents", ()):
            if name not in self.agents:
                raise ConfigError(
                    f"team {self.name}: has no agent {name!r}; there are: {', '.join(self.agents)}"
                )

    def greedy(self) -> Self:
        """The same team at temperature 0, for validation."""
        return replace(self, is_greedy=True)

    def agent_id(self, agent: str) -> str:
        return agent_id(self.name, agent)

    async def act(self, session: Session, situation: Situation, memory: Memory | None = None) -> TeamAction:
        """Runs the flow for one step of the environment."""
        s = TeamSession(
            session,
            self.name,
            self.agents,
            situation,
            self.performance,
            memory,
            greedy=self.is_greedy,
        )
        try:
            reply = await self.flow(s)
        finally:
            s.settle()
            s.close()
        if not s.calls:
            raise ConfigError(f"team {self.name}: its flow asked no agent in step {situation.step}")
        author = None if reply is None else reply.turn
        text = NOTHING if author is None or reply is None else reply.text
        return TeamAction(text, author, tuple(call.turn for call in s.calls if call.turn is not None))

    async def play_turns(
        self,
        session: Session,
        env: Env,
        settings: EpisodeSettings,
        policy: Policy,
        make_env: Callable[[], Env],
    ) -> StopReason:
        """Plays an episode from the first observation to its end."""
        async with ToolContext(session.trajectory.rollout_id) as tools:
            return await self._play_steps(session, env, settings, policy, Memory(tools=tools))

    async def _play_steps(
        self, session: Session, env: Env, settings: EpisodeSettings, policy: Policy, memory: Memory
    ) -> StopReason:
        trajectory = session.trajectory
        history: list[tuple[str, str]] = []
        observation = trajectory.observation
        for step in range(1, settings.max_steps + 1):
            if too_old(trajectory, policy.version, settings.max_staleness):
                return StopReason.STALE
            situation = Situation(
                question=trajectory.observation,
                observation=observation,
                instruction=env.instruction,
                history=tuple(history),
                step=step,
                max_steps=settings.max_steps,
            )
            try:
                action = await self.act(session, situation, memory)
            except OutOfRoom:
                return StopReason.MAX_LENGTH
            with session.waiting(Phase.ENVIRONMENT, "step", agent=self.name):
                done = len(trajectory.turns)
                taken = await bounded(
                    env.step(action.text), settings.limits.step_timeout, Boundary.ENVIRONMENT, done
                )
            answered = action.observe(session, taken)
            if answered.terminated:
                return StopReason.TERMINATED
            if answered.truncated:
                return StopReason.TRUNCATED
            if any(stops(settings.filters, trajectory.turns[turn.id]) for turn in action.calls):
                return StopReason.FILTERED
            observation = answered.observation
            history.append((action.text, observation))
        return StopReason.MAX_STEPS
