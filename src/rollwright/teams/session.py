"""Team session: the interface of a flow to its agents during one step of the environment.

Always true: calls are recorded in the trajectory in the order in which the flow made them. Agents of one `gather` see the
same context, and their answers are committed in declared order, whichever arrives first. A call that is made only because
a performance switch is off is discarded: it becomes no turn, changes no random draw, and is counted. Each recorded call
keeps its agent, its prompt and whether its format was valid; a penalty is recorded on the call that caused it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rollwright.agents import OutOfRoom, Session
from rollwright.errors import ConfigError
from rollwright.teams.agent import TeamAgent, agent_id
from rollwright.teams.context import ContextLog
from rollwright.teams.parsing import ParsedAnswer, Verdict
from rollwright.teams.settings import Performance
from rollwright.teams.tool_loop import AgentCall, AgentPrompt, ToolLoop
from rollwright.tools import ToolContext
from rollwright.trajectory import Outcome, Turn

FROZEN = "frozen"
"""`Turn.filtered` of a turn of an agent that is not trained."""

SPOKE = "spoke"
"""`Outcome.action` of a valid call whose answer was passed to other agents and not to the environment."""

MALFORMED = "malformed_verdicts"
INVALID = "invalid_calls"
"""Metrics of each agent, prefixed with the agent's id."""

FRAGMENTS_CUT, TOKENS_CUT = "context_fragments_cut", "context_tokens_cut"
DISCARDED_CALLS, DISCARDED_TOKENS = "discarded_calls", "discarded_tokens"
"""Metrics of the whole team."""


@dataclass(frozen=True)
class Situation:
    """State of the episode at one step, as templates show it."""

    question: str
    """The first observation of the episode."""
    observation: str
    """The latest observation."""
    instruction: str = ""
    history: tuple[tuple[str, str], ...] = ()
    """Actions of earlier steps, each with the observation that followed."""
    step: int = 1
    max_steps: int = 1

    def values(self) -> dict[str, object]:
        """Values of all template placeholders except `context`."""
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
    """The parsed answer of one call."""

    agent: str
    text: str = ""
    """The answer as the environment and other agents receive it."""
    valid: bool = True
    verdict: Verdict | None = None
    """Verdict of an agent that judges, else `None`."""
    malformed: bool = False
    """Whether a verdict was required and is missing; `verdict` is then the rule's default."""
    turn: Turn | None = None
    """The recorded turn; `None`: the agent was not called in this step."""

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
    """State of a team that is kept between the steps of one episode."""

    turns: dict[str, Turn] = field(default_factory=dict)
    """Latest turn of each agent."""
    aside: int = 0
    """Number of discarded calls; part of the key of their random draws."""
    tools: ToolContext | None = None
    """Tool state of the episode; `None`: every step has its own."""


class TeamSession:
    """Calls agents: `await s.call("solver")`, `await s.gather("info", "planning")`. Control flow is plain Python."""

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
        """Recorded calls of the step, in the order of the trajectory."""
        self._session = session
        self._team = team
        self._agents = agents
        self._performance = performance
        self._memory = memory or Memory()
        context = self._memory.tools or ToolContext(session.trajectory.rollout_id)
        self._tool_loop = ToolLoop(session, context, performance.enable_parallel_agents)
        self._tool_turns: list[tuple[str, Turn]] = []
        """Agent and turn of completions that called tools and were followed by another completion."""
        self._greedy = greedy
        self._values = situation.values()
        self._heard: dict[str, int] = {}
        """For each agent, the number of fragments when it was last called."""
        self._approved = self._discarding = False

    @property
    def step(self) -> int:
        """Step of the environment, from 1."""
        return self.situation.step

    @property
    def last_step(self) -> bool:
        return self.situation.step >= self.situation.max_steps

    async def call(self, agent: str) -> Reply:
        """Calls one agent."""
        return (await self.gather(agent))[0]

    async def gather(self, *agents: str) -> list[Reply]:
        """Calls agents that do not depend on each other. All of them see the current context."""
        if self._discarding:
            await self._discard_calls(agents)
            return [self.latest(agent) for agent in agents]
        # All prompts are built before the first answer, so that no agent sees the answer of another one.
        prompts = [self._prompt(agent) for agent in agents]
        known = [(self.agent_id(agent), self._agent(agent)) for agent in agents]
        answers = await self._tool_loop.run(known, prompts)
        return [self._commit(agent, answer) for agent, answer in zip(agents, answers, strict=True)]

    async def skip(self, *agents: str) -> None:
        """Declares that this rollout does not need these agents now."""
        if not self._performance.enable_agent_skip:
            await self._discard_calls(agents)

    def loops(self, count: int) -> Iterator[Round]:
        """Yields rounds until `approve` was called, at most `count`. If early termination is off, rounds after the approval
        run and their calls are discarded: they return the agent's latest recorded reply."""
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
        """Makes the current round the last one that counts."""
        self._approved = True

    def latest(self, agent: str) -> Reply:
        """The agent's latest reply in this step; an empty one if it was not called."""
        for reply in reversed(self.calls):
            if reply.agent == agent:
                return reply
        return Reply(agent)

    def agent_id(self, agent: str) -> str:
        """The agent's name in trajectories."""
        return agent_id(self._team, agent)

    def settle(self) -> None:
        """Records on every call of the step its validity, its penalty and whether it is frozen. `TeamAction.observe` adds
        the environment's outcome."""
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
        for name, turn in self._tool_turns:  # their outcomes were recorded with the tool results
            if not self._agents[name].trainable:
                turns[turn.id] = msgspec.structs.replace(turns[turn.id], filtered=FROZEN)

    def close(self) -> None:
        """Releases the tool state if it belongs to this step alone."""
        if self._memory.tools is None:
            self._tool_loop.context.close()

    def _agent(self, name: str) -> TeamAgent:
        try:
            return self._agents[name]
        except KeyError:
            known = ", ".join(self._agents)
            raise ConfigError(f"team {self._team}: has no agent {name!r}; there are: {known}") from None

    def _prompt(self, name: str, *, keep: bool = True) -> AgentPrompt:
        """Builds the prompt of one call. `keep`: whether the call will be recorded."""
        agent = self._agent(name)
        earlier = self._memory.turns.get(name) if agent.again is not None else None
        again = earlier is not None
        fitted = self.context.fit(
            agent.messages(self._values, "", again),
            self._performance.max_context_length,
            self._session.policy_of(self.agent_id(name)).renderer,
            since=self._heard.get(name, 0) if again else 0,
            without=name if again else None,  # its own answers are in its earlier turns
        )
        if keep:
            self._heard[name] = len(self.context.fragments)
            if fitted.cut:
                self._count(FRAGMENTS_CUT, fitted.cut)
                self._count(TOKENS_CUT, fitted.cut_tokens)
        sampling = agent.override(self._session.sampling)
        if self._greedy:
            sampling = msgspec.structs.replace(sampling, temperature=0.0)
        return AgentPrompt(agent.messages(self._values, fitted.text, again), earlier, sampling)

    def _commit(self, name: str, call: AgentCall) -> Reply:
        """Parses the answer of a call, records it and adds it to the context."""
        agent, turn = self._agent(name), call.turn
        text = turn.text
        if call.result is not None:
            text = call.result
            answer = ParsedAnswer(text, valid=True)
        elif call.has_answer:
            answer = agent.reading.read(text)
        else:
            text, answer = "", ParsedAnswer("", valid=False)
        verdict, malformed = None, False
        if agent.verdict is not None:
            verdict, malformed = agent.verdict.judge(text)
        self._tool_turns += [(name, each) for each in call.tool_turns]
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

    async def _discard_calls(self, agents: Sequence[str]) -> None:
        """Calls agents and discards their answers. A prompt without room for an answer does not end the episode."""
        for name in agents:
            prompt = self._prompt(name, keep=False)
            self._memory.aside += 1
            try:
                turn = await self._session.generate_aside(
                    prompt.messages,
                    self._memory.aside,
                    continues=prompt.continues,
                    agent=self.agent_id(name),
                    tools=self._agent(name).specs,
                    sampling=prompt.sampling,
                )
            except OutOfRoom:
                continue
            self._count(DISCARDED_CALLS, 1)
            self._count(DISCARDED_TOKENS, turn.completion_tokens)

    def _count(self, name: str, amount: float) -> None:
        metrics = self._session.trajectory.metrics
        metrics[name] = metrics.get(name, 0.0) + amount
