"""A team session: one step of the environment, as the code that leads a team sees it.

Always true: calls stand in the trajectory in the order in which they were asked for, and agents that were asked
together saw the same context and are committed in declared order, whoever answers first. A call that is made only
because a switch is off is thrown away: it is no turn, changes no draw, and is counted. Each call keeps its agent, its
own prompt and whether it had the asked-for form; a penalty stands on the call that earned it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rollwright.agents import OutOfRoom, Session
from rollwright.errors import ConfigError
from rollwright.teams.agent import TeamAgent, agent_id, changed_sampling
from rollwright.teams.context import ContextLog
from rollwright.teams.parsing import Answer, Verdict
from rollwright.teams.settings import Performance
from rollwright.teams.tool_loop import Answered, Asked, ToolRounds
from rollwright.tools import ToolContext
from rollwright.trajectory import Outcome, Turn

FROZEN = "frozen"
"""`Turn.filtered` of an agent that is not trained."""

SPOKE = "spoke"
"""`Outcome.action` of a valid call whose answer went to the others and not to the environment."""

MALFORMED = "malformed_verdicts"
INVALID = "invalid_calls"
"""Metrics of each agent; its id stands before them."""

FRAGMENTS_CUT, TOKENS_CUT = "context_fragments_cut", "context_tokens_cut"
DISCARDED_CALLS, DISCARDED_TOKENS = "discarded_calls", "discarded_tokens"
"""Metrics of the whole team."""


@dataclass(frozen=True)
class Situation:
    """What the team knows of the environment at one step."""

    question: str
    """What the environment showed first."""
    observation: str
    """What it showed last."""
    instruction: str = ""
    history: tuple[tuple[str, str], ...] = ()
    """Actions of earlier steps, each with what it led to."""
    step: int = 1
    max_steps: int = 1

    def values(self) -> dict[str, object]:
        """For templates, all but the context."""
        lines = (f"Step {number}: {action} {seen}" for number, (action, seen) in enumerate(self.history, 1))
        return {
            "instruction": self.instruction,
            "question": self.question,
            "observation": self.observation,
            "history": "\n".join(lines),
            "step": self.step,
            "max_steps": self.max_steps,
            "steps_left": self.max_steps - self.step,
        }


@dataclass(frozen=True)
class Reply:
    """What an agent said."""

    agent: str
    text: str = ""
    """Its answer, as the environment and the other agents get it."""
    valid: bool = True
    verdict: Verdict | None = None
    """For an agent that judges."""
    malformed: bool = False
    """It should have judged and did not; `verdict` is what its rule says for that."""
    turn: Turn | None = None
    """The call; `None`: the agent was not called in this step."""

    @property
    def approves(self) -> bool:
        return self.verdict is Verdict.APPROVE


@dataclass(frozen=True)
class Round:
    """One pass of a loop."""

    number: int
    """From 0."""
    last: bool


@dataclass
class Memory:
    """What lasts from step to step of one episode."""

    turns: dict[str, Turn] = field(default_factory=dict)
    """Each agent's last call."""
    aside: int = 0
    """Calls that were thrown away."""
    tools: ToolContext | None = None
    """What the tools of its agents hold; `None`: every step has its own."""


class TeamSession:
    """`await s.call("solver")`, `await s.gather("info", "planning")`; everything else is Python."""

    def __init__(
        self,
        session: Session,
        team: str,
        agents: Mapping[str, TeamAgent],
        situation: Situation,
        performance: Performance,
        memory: Memory | None = None,
        *,
        greedy: bool = False,
    ) -> None:
        self.situation = situation
        self.context = ContextLog()
        self.calls: list[Reply] = []
        """In the order of the trajectory, without those that were thrown away."""
        self._session = session
        self._team = team
        self._agents = agents
        self._performance = performance
        self._memory = memory or Memory()
        context = self._memory.tools or ToolContext(session.trajectory.rollout_id)
        self._rounds = ToolRounds(session, context, performance.enable_parallel_agents)
        self._tool_turns: list[tuple[str, Turn]] = []
        """By agent: completions that called tools and were followed by another."""
        self._greedy = greedy
        self._values = situation.values()
        self._heard: dict[str, int] = {}
        """For each agent, the fragments that there were when it was last asked."""
        self._approved = self._discarding = False

    @property
    def step(self) -> int:
        """Of the environment, from 1."""
        return self.situation.step

    @property
    def last_step(self) -> bool:
        return self.situation.step >= self.situation.max_steps

    async def call(self, agent: str) -> Reply:
        """Asks one agent."""
        return (await self.gather(agent))[0]

    async def gather(self, *agents: str) -> list[Reply]:
        """Asks agents that do not depend on each other. All see the context as it stands now."""
        if self._discarding:
            await self._throw_away(agents)
            return [self.latest(agent) for agent in agents]
        asked = [self._ask(agent) for agent in agents]
        known = [(self.agent_id(agent), self._agent(agent)) for agent in agents]
        answers = await self._rounds.ask(known, asked)
        return [self._take(agent, answer) for agent, answer in zip(agents, answers, strict=True)]

    async def skip(self, *agents: str) -> None:
        """Says that this sample does not need these agents now."""
        if not self._performance.enable_agent_skip:
            await self._throw_away(agents)

    def loops(self, count: int) -> Iterator[Round]:
        """Rounds until `approve` was called, at most `count`. Where early termination is off, rounds after the approval
        are gone through and thrown away: calls in them give what the agent said last."""
        try:
            for number in range(count):
                if self._approved:
                    if self._performance.enable_early_termination:
                        return
                    self._discarding = True
                yield Round(number, number == count - 1)
        finally:
            self._approved = self._discarding = False

    def approve(self) -> None:
        """The round that runs now is the last one that counts."""
        self._approved = True

    def latest(self, agent: str) -> Reply:
        """What the agent said last in this step."""
        for reply in reversed(self.calls):
            if reply.agent == agent:
                return reply
        return Reply(agent)

    def agent_id(self, agent: str) -> str:
        """The agent's name in trajectories."""
        return agent_id(self._team, agent)

    def settle(self) -> None:
        """Leaves on every call of the step whether it is frozen, its form and its penalty. What the environment answers
        comes on top."""
        turns = self._session.trajectory.turns
        for reply in self.calls:
            assert reply.turn is not None
            agent = self._agents[reply.agent]
            outcome = Outcome(
                observation=self.situation.observation,
                reward=0.0,
                penalty=0.0 if reply.valid else agent.invalid_penalty,
                action=(reply.verdict or SPOKE) if reply.valid else None,
                valid=reply.valid,
            )
            turns[reply.turn.id] = msgspec.structs.replace(
                turns[reply.turn.id], outcome=outcome, filtered=None if agent.trainable else FROZEN
            )
        for name, turn in self._tool_turns:  # what their calls came to is on them already
            if not self._agents[name].trainable:
                turns[turn.id] = msgspec.structs.replace(turns[turn.id], filtered=FROZEN)

    def close(self) -> None:
        """Gives back what tools hold, where that was for this step alone."""
        if self._memory.tools is None:
            self._rounds.context.close()

    def _agent(self, name: str) -> TeamAgent:
        try:
            return self._agents[name]
        except KeyError:
            known = ", ".join(self._agents)
            raise ConfigError(f"team {self._team}: has no agent {name!r}; there are: {known}") from None

    def _ask(self, name: str, *, keep: bool = True) -> Asked:
        agent = self._agent(name)
        earlier = self._memory.turns.get(name) if agent.again is not None else None
        again = earlier is not None
        fitted = self.context.fitted(
            agent.messages(self._values, "", again),
            self._performance.max_context_length,
            self._session.policy_of(self.agent_id(name)).renderer,
            since=self._heard.get(name, 0) if again else 0,
            without=name if again else None,  # its own words stand in its own turn
        )
        if keep:
            self._heard[name] = len(self.context.fragments)
            if fitted.cut:
                self._count(FRAGMENTS_CUT, fitted.cut)
                self._count(TOKENS_CUT, fitted.cut_tokens)
        sampling = changed_sampling(self._session.sampling, agent.sampling)
        if self._greedy:
            sampling = msgspec.structs.replace(sampling, temperature=0.0)
        return Asked(agent.messages(self._values, fitted.text, again), earlier, sampling)

    def _take(self, name: str, answered: Answered) -> Reply:
        """Reads an answer and commits it to the context."""
        agent, turn = self._agent(name), answered.turn
        said = turn.text
        if answered.result is not None:
            said = answered.result
            answer = Answer(said, valid=True)
        elif answered.has_answer:
            answer = agent.reading.read(said)
        else:
            said, answer = "", Answer("", valid=False)
        verdict, malformed = None, False
        if agent.verdict is not None:
            verdict, malformed = agent.verdict.judge(said)
        self._tool_turns += [(name, each) for each in answered.tool_turns]
        valid = answer.valid and not malformed
        reply = Reply(name, answer.text, valid, verdict, malformed, turn)
        if malformed:
            self._count(f"{turn.agent}.{MALFORMED}", 1)
        if not valid:
            self._count(f"{turn.agent}.{INVALID}", 1)
        self.calls.append(reply)
        self._memory.turns[name] = turn
        if agent.shares:
            self.context.add(name, answer.text)
        return reply

    async def _throw_away(self, agents: Sequence[str]) -> None:
        """Asks agents whose answers nobody needs, one after the other. One without room to answer ends nothing."""
        for name in agents:
            asked = self._ask(name, keep=False)
            self._memory.aside += 1
            try:
                turn = await self._session.generate_aside(
                    asked.messages,
                    self._memory.aside,
                    continues=asked.continues,
                    agent=self.agent_id(name),
                    tools=self._agent(name).specs,
                    sampling=asked.sampling,
                )
            except OutOfRoom:
                continue
            self._count(DISCARDED_CALLS, 1)
            self._count(DISCARDED_TOKENS, turn.completion_tokens)

    def _count(self, name: str, amount: float) -> None:
        metrics = self._session.trajectory.metrics
        metrics[name] = metrics.get(name, 0.0) + amount
