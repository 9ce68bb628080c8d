"""The tool agent: generates, runs the tool calls of the turn concurrently, appends their results, and repeats.

It ends when the model answers without a call, when a tool ends the episode, or at a limit. Errors of the model are returned
to it as tool results; a tool that cannot be run at all ends the attempt (`Boundary.TOOL`). Tool state of the rollout is
released on every exit.

In a resumed attempt, a call whose result is in the journal is not repeated: the recorded result is used. Calls of stateful
tools are repeated to rebuild their state; if a result differs, the attempt restarts (`ReplayDiffers`). Only calls of the
last recorded turn may have run before without a record.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from rollwright.agents.failures import failed
from rollwright.agents.journal import ReplayDiffers
from rollwright.agents.session import OutOfRoom, Session
from rollwright.engines.base import Parsed, Sampling
from rollwright.envs.base import Step
from rollwright.tools import Toolbox, ToolContext, ToolFailure, ToolResult
from rollwright.trajectory import Boundary, Message, Outcome, Phase, StopReason, ToolCall, Turn

TOOL_CALLS, TOOL_PROBLEMS, TOOL_SECONDS = "tool_calls", "tool_problems", "tool_seconds"
"""Metrics of a trajectory: tool calls, calls without a result, and the time of all calls."""


@dataclass(frozen=True)
class Solution:
    """How an episode with tools ended."""

    answer: str
    """The model's final answer, or the result of the tool that ended the episode; empty at a limit."""
    stop: StopReason
    turn: Turn | None
    """The last turn; `None`: there was no room for one."""
    ended_by: ToolResult | None = None
    """The tool that ended the episode; `None`: none did."""


@dataclass(frozen=True)
class ToolAgent:
    """Solves a task with tools; holds no state of an episode."""

    toolbox: Toolbox
    system: str = ""
    """The system prompt; empty: none. Tools are added to it in the model's own format."""
    max_turns: int = 10
    name: str = "agent"
    sampling: Sampling | None = None
    """`None`: the session's."""

    async def solve(
        self, session: Session, task: str | Sequence[Message], *, context: ToolContext | None = None
    ) -> Solution:
        """Plays the whole episode; `task` is the first user message, or all messages before the first turn.

        With a `context`, tool state is kept in it, and its owner closes it.
        """
        opening = self.opening(task) if isinstance(task, str) else tuple(task)
        if not session.trajectory.opening:
            session.trajectory.opening = opening
        if context is not None:
            return await self._solve(session, opening, context)
        async with ToolContext(session.trajectory.rollout_id) as own:
            return await self._solve(session, opening, own)

    def opening(self, task: str) -> tuple[Message, ...]:
        system = (Message("system", self.system),) if self.system else ()
        return (*system, Message("user", task))

    async def _solve(self, session: Session, opening: Sequence[Message], context: ToolContext) -> Solution:
        messages, turn = opening, None
        for _ in range(self.max_turns):
            try:
                turn = await session.generate(
                    messages,
                    continues=turn,
                    agent=self.name,
                    tools=self.toolbox.specs,
                    sampling=self.sampling,
                )
            except OutOfRoom:
                return Solution("", StopReason.MAX_LENGTH, turn)
            parsed = session.parse(turn)
            if not parsed.tool_calls and not parsed.malformed:
                turn = session.observe(turn, Step("", 0.0, True, False, {"action": parsed.content}))
                return Solution(parsed.content, StopReason.TERMINATED, turn)
            turn, results, told = await use_tools(session, self.toolbox, turn, parsed, context)
            ending = next((each for each in results if each.ends_episode), None)
            if ending is not None:
                return Solution(ending.content, StopReason.TERMINATED, turn, ending)
            messages = told
        return Solution("", StopReason.MAX_STEPS, turn)


async def use_tools(
    session: Session,
    toolbox: Toolbox,
    turn: Turn,
    parsed: Parsed,
    context: ToolContext,
    *,
    may_end: bool = True,
) -> tuple[Turn, list[ToolResult], list[Message]]:
    """Runs the tool calls of a turn concurrently, records their results, and returns the messages for the model.

    `may_end`: whether a tool can end the episode; if not, the record contains no end.
    """
    recorded = session.recorded_outcome(turn)
    try:
        results = await _run_calls(session, toolbox, turn.agent, parsed.tool_calls, recorded, context)
    except ToolFailure as error:
        raise failed(Boundary.TOOL, error, turn.id + 1) from error
    # A call that cannot be parsed has no id, so its error is a user message.
    unread = [Message("user", toolbox.unreadable(each)) for each in parsed.malformed]
    problems = sum(each.problem is not None for each in results) + len(unread)
    step = Step(
        observation=_join([*(each.content for each in results), *(each.content for each in unread)]),
        reward=0.0,
        terminated=may_end and any(each.ends_episode for each in results),
        truncated=False,
        info={
            "action": ", ".join(call.name for call in parsed.tool_calls) or None,
            "valid": recorded.valid if recorded is not None else not problems,
            "metrics": {
                TOOL_CALLS: len(results),
                TOOL_PROBLEMS: problems,
                TOOL_SECONDS: sum(each.seconds for each in results),
            },
        },
    )
    return session.observe(turn, step), results, [*(each.message() for each in results), *unread]


async def _run_calls(
    session: Session,
    toolbox: Toolbox,
    agent: str,
    calls: Sequence[ToolCall],
    recorded: Outcome | None,
    context: ToolContext,
) -> list[ToolResult]:
    def around(call: ToolCall) -> AbstractContextManager[object]:
        name = call.name if call.name in toolbox else "unknown"
        return session.waiting(Phase.TOOL, name, agent=agent)

    if recorded is None:
        return await toolbox.run(calls, context, around)
    told = _split(recorded.observation, at_least=len(calls))
    again = [call for call in calls if call.name in toolbox and toolbox[call.name].stateful]
    ran = {each.call.id: each for each in await toolbox.run(again, context, around)}
    return [ran.get(call.id, ToolResult(call, content)) for call, content in zip(calls, told, strict=False)]


def _join(contents: list[str]) -> str:
    """Encodes several texts as one: a JSON list."""
    return msgspec.json.encode(contents).decode()


def _split(observation: str, at_least: int) -> list[str]:
    try:
        told = msgspec.json.decode(observation, type=list[str])
    except msgspec.MsgspecError as error:
        raise ReplayDiffers(f"the recorded results of tools cannot be read: {error}") from error
    if len(told) < at_least:
        raise ReplayDiffers(f"{at_least} calls, and {len(told)} recorded results")
    return told
