"""Agents that are asked together, and go on until none of them calls a tool any more.

Always true: in each round those that called a tool are asked again, in declared order, once all results of the round are
there; so the calls stand in the trajectory in the same order whoever answers first, and whether they run side by side or
one after the other. A result is told to the agent that called alone.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rollwright.agents import Session, together
from rollwright.agents.tool_agent import use_tools
from rollwright.engines.base import Parsed, Sampling
from rollwright.teams.agent import TeamAgent
from rollwright.tools import ToolContext, ToolResult
from rollwright.trajectory import Message, Turn

Result = TypeVar("Result")


class Asked(NamedTuple):
    """A call, ready to be made."""

    messages: Sequence[Message]
    continues: Turn | None
    sampling: Sampling


@dataclass(frozen=True)
class Answered:
    """How a call ended."""

    turn: Turn
    """The last."""
    result: str | None = None
    """Of the tool that ended the call; `None`: the completion is the answer."""
    has_answer: bool = True
    """False: it still called tools when it had no turn left."""
    tool_turns: tuple[Turn, ...] = ()
    """Those before it, whose calls were run."""


@dataclass
class ToolRounds:
    """Asks agents together."""

    session: Session
    context: ToolContext
    side_by_side: bool

    async def ask(self, agents: Sequence[tuple[str, TeamAgent]], asked: Sequence[Asked]) -> list[Answered]:
        """Each agent's answer; agents by id, in declared order."""
        calls = [_Call(agent_id, agent, each) for (agent_id, agent), each in zip(agents, asked, strict=True)]
        going = calls
        while going:
            turns = await self._each([partial(self._generate, call) for call in going])
            for call, turn in zip(going, turns, strict=True):
                call.turn = turn
            going = [call for call in going if self._calls_tools(call)]
            used = await self._each([partial(self._use, call) for call in going])
            going = [call for call, goes_on in zip(going, used, strict=True) if goes_on]
        return [call.answered() for call in calls]

    async def _each(self, work: Sequence[Callable[[], Coroutine[Any, Any, Result]]]) -> list[Result]:
        if self.side_by_side:
            return await together(each() for each in work)
        return [await each() for each in work]

    async def _generate(self, call: "_Call") -> Turn:
        return await self.session.generate(
            call.asked.messages,
            continues=call.asked.continues,
            agent=call.agent_id,
            tools=call.agent.specs,
            sampling=call.asked.sampling,
        )

    def _calls_tools(self, call: "_Call") -> bool:
        if call.agent.toolbox is None or call.turn is None:
            return False
        call.parsed = self.session.parse(call.turn)
        if not call.parsed.tool_calls and not call.parsed.malformed:
            return False
        call.has_answer = len(call.used) + 1 < call.agent.max_tool_turns
        return call.has_answer

    async def _use(self, call: "_Call") -> bool:
        """Whether the agent is to be asked again."""
        assert call.turn is not None
        assert call.parsed is not None
        assert call.agent.toolbox is not None
        turn, results, told = await use_tools(
            self.session, call.agent.toolbox, call.turn, call.parsed, self.context, may_end=False
        )
        call.ending = next((each for each in results if each.ends_episode), None)
        if call.ending is not None:
            return False
        call.used.append(turn)
        call.asked = call.asked._replace(messages=told, continues=turn)
        return True


@dataclass
class _Call:
    """One agent's, while it goes on."""

    agent_id: str
    agent: TeamAgent
    asked: Asked
    turn: Turn | None = None
    parsed: Parsed | None = None
    used: list[Turn] = field(default_factory=list)
    ending: ToolResult | None = None
    has_answer: bool = True

    def answered(self) -> Answered:
        assert self.turn is not None
        found = Answered(self.turn, None, self.has_answer, tuple(self.used))
        return found if self.ending is None else replace(found, result=self.ending.content)
