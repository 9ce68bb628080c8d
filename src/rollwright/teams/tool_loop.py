"""Tool loop of agents that are called together: generate, run tool calls, generate again, until none calls a tool.

Always true: agents that called a tool generate again in declared order, after all tool results of the round have arrived.
So the order of turns in the trajectory does not depend on which answer arrives first, or on whether calls run concurrently
or one after the other. Only the agent that called a tool sees its result.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rollwright.agents import Session
from rollwright.agents.tool_agent import use_tools
from rollwright.aio import together
from rollwright.engines.base import Parsed, Sampling
from rollwright.teams.agent import TeamAgent
from rollwright.tools import ToolContext, ToolResult
from rollwright.trajectory import Message, Turn

Result = TypeVar("Result")


class AgentPrompt(NamedTuple):
    """The arguments of one generation."""

    messages: Sequence[Message]
    continues: Turn | None
    sampling: Sampling


@dataclass(frozen=True)
class AgentCall:
    """The result of calling one agent."""

    turn: Turn
    """The last turn."""
    result: str | None = None
    """Result of the tool that ended the call; `None`: the completion is the answer."""
    has_answer: bool = True
    """False: the last permitted completion still called tools."""
    tool_turns: tuple[Turn, ...] = ()
    """Earlier turns, whose tool calls were run."""


@dataclass
class ToolLoop:
    """Calls agents together, in rounds."""

    session: Session
    context: ToolContext
    concurrent: bool

    async def run(
        self, agents: Sequence[tuple[str, TeamAgent]], prompts: Sequence[AgentPrompt]
    ) -> list[AgentCall]:
        """Runs the calls to their answers. `agents`: ids and agents, in declared order, as the results are."""
        calls = [
            _Call(agent_id, agent, each) for (agent_id, agent), each in zip(agents, prompts, strict=True)
        ]
        active = calls
        while active:
            turns = await self._run_each([partial(self._generate, call) for call in active])
            for call, turn in zip(active, turns, strict=True):
                call.turn = turn
            active = [call for call in active if self._calls_tools(call)]
            continued = await self._run_each([partial(self._run_tools, call) for call in active])
            active = [call for call, goes_on in zip(active, continued, strict=True) if goes_on]
        return [call.finish() for call in calls]

    async def _run_each(self, work: Sequence[Callable[[], Coroutine[Any, Any, Result]]]) -> list[Result]:
        if self.concurrent:
            return await together(each() for each in work)
        return [await each() for each in work]

    async def _generate(self, call: "_Call") -> Turn:
        return await self.session.generate(
            call.prompt.messages,
            continues=call.prompt.continues,
            agent=call.agent_id,
            tools=call.agent.specs,
            sampling=call.prompt.sampling,
        )

    def _calls_tools(self, call: "_Call") -> bool:
        """Parses the latest turn. False: it has no tool call, or the limit of turns is reached."""
        if call.agent.toolbox is None or call.turn is None:
            return False
        call.parsed = self.session.parse(call.turn)
        if not call.parsed.tool_calls and not call.parsed.malformed:
            return False
        call.has_answer = len(call.used) + 1 < call.agent.max_tool_turns
        return call.has_answer

    async def _run_tools(self, call: "_Call") -> bool:
        """Runs the tool calls of the latest turn; returns whether the agent generates again."""
        assert call.turn is not None
        assert call.parsed is not None
        assert call.agent.toolbox is not None
        turn, results, messages = await use_tools(
            self.session, call.agent.toolbox, call.turn, call.parsed, self.context, may_end=False
        )
        call.ending = next((each for each in results if each.ends_episode), None)
        if call.ending is not None:
            return False
        call.used.append(turn)
        call.prompt = call.prompt._replace(messages=messages, continues=turn)
        return True


@dataclass
class _Call:
    """State of one call while its tool loop runs."""

    agent_id: str
    agent: TeamAgent
    prompt: AgentPrompt
    turn: Turn | None = None
    parsed: Parsed | None = None
    used: list[Turn] = field(default_factory=list)
    """Turns whose tool calls were run."""
    ending: ToolResult | None = None
    """Result of a tool that ends the call."""
    has_answer: bool = True

    def finish(self) -> AgentCall:
        assert self.turn is not None
        found = AgentCall(self.turn, None, self.has_answer, tuple(self.used))
        return found if self.ending is None else replace(found, result=self.ending.content)
