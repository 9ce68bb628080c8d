"""An agent with tools: calls run side by side, mistakes are told, and a resumed episode does not call again."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rollwright.agents import EpisodeFailure, JournalEntry, ReplayDiffers, Session
from rollwright.agents.tool_agent import TOOL_CALLS, TOOL_PROBLEMS, Solution, ToolAgent
from rollwright.aio import run_virtual
from rollwright.engines.base import Generation, Parsed, Prompt, Sampling, ToolSpec
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.observe.profile import Profile
from rollwright.tools import Pool, Toolbox, ToolContext, ToolFailure, tool
from rollwright.trajectory import (
    Boundary,
    FinishReason,
    Message,
    Phase,
    StopReason,
    Timing,
    TokenIds,
    ToolCall,
    Trajectory,
    VersionRun,
    check,
    floats,
    samples,
)


class CallingRenderer(BytesRenderer):
    """Calls are lines of JSON behind `call `; a line that starts so and is none is malformed."""

    def parse(self, prompt: TokenIds, sampled: TokenIds, tools: Sequence[ToolSpec] = ()) -> Parsed:
        text = self.decode(sampled)
        calls, malformed = [], []
        for at, line in enumerate(each for each in text.splitlines() if each.startswith("call ")):
            try:
                name, arguments = json.loads(line.removeprefix("call "))
            except ValueError:
                malformed.append(line)
            else:
                calls.append(ToolCall(f"{len(prompt)}-{at}", name, json.dumps(arguments)))
        return Parsed(text, tool_calls=tuple(calls), malformed=tuple(malformed))


RENDERER = CallingRenderer()


class Scripted:
    """Says one line after the other; `renderer` shows what it was asked."""

    version = 0
    pressure = 0
    renderer = RENDERER

    def __init__(self, *script: str) -> None:
        self.script = script
        self.asked: list[str] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        assert prompt.ids is not None
        self.asked.append(RENDERER.decode(prompt.ids))
        said = self.script[len(self.asked) - 1]
        ids = RENDERER.encode(said)
        return Generation(said, ids, floats([-1.0]) * len(ids), (VersionRun(0, len(ids)),), FinishReason.STOP)

    async def close(self) -> None:
        """Holds nothing."""


class Records:
    """A journal in memory."""

    def __init__(self, recorded: Sequence[JournalEntry] = ()) -> None:
        self.recorded = {entry.place: entry for entry in recorded}
        self.appended: list[JournalEntry] = []

    async def append(self, entry: JournalEntry) -> None:
        self.appended.append(JournalEntry.from_bytes(entry.to_bytes()))


def session(policy: Scripted, journal: Records | None = None, sequence_length: int = 10_000) -> Session:
    trajectory = Trajectory("r", "a", "g", "tools", seed=1)
    return Session(
        trajectory,
        policy,
        Sampling(),
        ("key",),
        sequence_length=sequence_length,
        generate_timeout=1e6,
        journal=journal,
    )


class Bench:
    """Tools that note what they did."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.closed: list[str] = []
        self.pool: Pool[list[str]] = Pool(self._make, size=1, close=self._close)
        made, pool = self.made, self.pool

        @tool
        async def look(what: str) -> str:
            made.append(f"look {what}")
            await asyncio.sleep(1)
            return f"{what} is there"

        @tool
        async def write(word: str, context: ToolContext) -> str:
            page = await context.lease(pool)
            page.append(word)
            return " ".join(page)

        @tool(ends_episode=True)
        async def submit(answer: str) -> str:
            return answer

        @tool
        async def unplugged() -> None:
            raise ToolFailure("no power")

        self.box = Toolbox([look, write, submit, unplugged])
        self.agent = ToolAgent(self.box, "Use tools.", max_turns=4)

    async def _make(self, key: Any) -> list[str]:
        return []

    async def _close(self, page: list[str]) -> None:
        self.closed.append(" ".join(page))


def said(name: str, **arguments: Any) -> str:
    return f"call {json.dumps([name, arguments])}"


def play(policy: Scripted, bench: Bench, at: Session | None = None, task: str = "Go.") -> Solution:
    async def main() -> Solution:
        solution = await bench.agent.solve(at or session(policy), task)
        await asyncio.sleep(1)
        return solution

    return run_virtual(main())


def test_calls_are_run_and_told_until_the_model_answers() -> None:
    bench = Bench()
    policy = Scripted(said("look", what="cup") + "\n" + said("look", what="jug"), "Both are there.")
    at = session(policy)

    async def main() -> Solution:
        solution = await bench.agent.solve(at, "What is there?")
        assert asyncio.get_running_loop().time() == pytest.approx(1)
        return solution

    solution = run_virtual(main())
    assert (solution.answer, solution.stop) == ("Both are there.", StopReason.TERMINATED)
    assert sorted(bench.made) == ["look cup", "look jug"]
    assert policy.asked[1].endswith("cup is therejug is there")
    assert at.trajectory.opening == (Message("system", "Use tools."), Message("user", "What is there?"))
    assert (at.trajectory.metrics[TOOL_CALLS], at.trajectory.metrics[TOOL_PROBLEMS]) == (2, 0)


def test_an_episode_with_tools_is_one_sequence_in_which_only_sampled_tokens_are_trained() -> None:
    policy = Scripted(said("look", what="cup"), said("look", what="jug"), "Done.")
    at = session(policy)
    play(policy, Bench(), at)
    trajectory = at.seal()
    check(trajectory)
    (sample,) = samples(trajectory)
    trained = [token for token, mask in zip(sample.token_ids, sample.mask, strict=True) if mask]
    assert trained == [token for turn in trajectory.turns for token in turn.sampled_ids]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (said("lok", what="cup"), "There is no tool 'lok'; did you mean 'look'?"),
        (said("look"), "look: wrong arguments: what: Field required"),
        ("call {look", "A tool call could not be read: 'call {look'. Tools: look, write, submit, unplugged."),
    ],
)
def test_a_mistake_is_told_and_the_episode_goes_on(answer: str, told: str) -> None:
    policy = Scripted(answer, "I see.")
    at = session(policy)
    assert play(policy, Bench(), at).answer == "I see."
    assert told in policy.asked[1]
    first = at.trajectory.turns[0].outcome
    assert first is not None
    assert not first.valid
    assert at.trajectory.metrics[TOOL_PROBLEMS] == 1


def test_a_tool_that_ends_the_episode_gives_its_answer() -> None:
    policy = Scripted(said("look", what="cup") + "\n" + said("submit", answer="42"))
    solution = play(policy, Bench())
    assert (solution.answer, solution.stop, len(policy.asked)) == ("42", StopReason.TERMINATED, 1)
    assert solution.ended_by is not None
    assert solution.ended_by.call.name == "submit"


def test_an_episode_ends_at_its_limits() -> None:
    bench = Bench()
    assert play(Scripted(*[said("look", what="cup")] * 9), bench).stop is StopReason.MAX_STEPS
    assert len(bench.made) == 4
    policy = Scripted(*[said("look", what="cup")] * 9)
    assert play(policy, Bench(), session(policy, sequence_length=120)).stop is StopReason.MAX_LENGTH


def test_a_tool_that_cannot_be_run_ends_the_attempt_at_its_boundary() -> None:
    policy = Scripted(said("write", word="a"), said("unplugged"))
    bench = Bench()
    with pytest.raises(EpisodeFailure) as caught:
        play(policy, bench)
    assert (caught.value.record.boundary, caught.value.record.turn) == (Boundary.TOOL, 2)
    assert bench.pool.leased == 0


def test_what_tools_hold_is_given_back_when_the_episode_ends() -> None:
    policy = Scripted(said("write", word="a"), said("write", word="b"), "Done.")
    bench = Bench()
    play(policy, bench)
    assert bench.closed == ["a b"]
    assert bench.pool.leased == 0


def test_waiting_for_what_others_hold_is_no_time_of_the_tool() -> None:
    """A pool that is empty, and a limit on calls at once, are locks; the tool's own time is told apart."""
    bench = Bench()

    @tool(concurrency=1)
    async def narrow() -> str:
        await asyncio.sleep(2)
        return "done"

    agent = ToolAgent(Toolbox([bench.box["write"], narrow]))
    calls = said("write", word="a") + "\n" + said("narrow") + "\n" + said("narrow")
    seen: list[Phase] = []

    async def main() -> Timing:
        at = session(Scripted(calls, "Done."))
        other = await bench.pool.acquire()
        loop = asyncio.get_running_loop()
        loop.call_later(10, other.release)
        for moment in (1, 5, 11):
            loop.call_later(moment, lambda: seen.append(at.phase))
        await agent.solve(at, "Go.")
        return at.stopwatch.read()

    found = run_virtual(main())
    waits = sorted((wait.phase, wait.name, wait.seconds) for wait in found.waits)
    assert [wait for wait in waits if wait[0] is Phase.LOCK] == [
        (Phase.LOCK, "narrow", 2),
        (Phase.LOCK, "write", 10),
    ]
    assert [wait for wait in waits if wait[0] is Phase.TOOL] == [
        (Phase.TOOL, "narrow", 2),
        (Phase.TOOL, "narrow", 2),
        (Phase.TOOL, "write", 0),
    ]
    assert seen[:2] == [Phase.TOOL, Phase.LOCK]
    profile = Profile()
    profile.add("Lab", found)
    assert (profile.seconds(Phase.TOOL), profile.seconds(Phase.LOCK)) == (4, 6)


def test_a_call_that_is_given_up_in_line_has_waited_for_a_lock() -> None:
    bench = Bench()

    async def main() -> Timing:
        at = session(Scripted(said("write", word="a")))
        other = await bench.pool.acquire()
        await asyncio.wait({asyncio.create_task(bench.agent.solve(at, "Go."))}, timeout=3)
        assert not other.is_over
        return at.stopwatch.read()

    assert [(wait.phase, wait.seconds) for wait in run_virtual(main()).waits][1:] == [
        (Phase.LOCK, 3),
        (Phase.TOOL, 0),
    ]


def resumed(bench: Bench, recorded: Sequence[JournalEntry], *script: str) -> tuple[Solution, Scripted]:
    policy = Scripted(*script)
    return play(policy, bench, session(policy, Records(recorded))), policy


def test_a_resumed_attempt_takes_results_from_the_journal_instead_of_calling_again() -> None:
    script = (said("look", what="cup") + "\n" + said("lok"), said("look", what="jug"), "Done.")
    journal = Records()
    policy = Scripted(*script)
    whole = session(policy, journal)
    play(policy, Bench(), whole)
    bench = Bench()
    solution, again = resumed(bench, journal.appended[:2], "Done.")
    assert bench.made == ["look jug"]  # the last call whose result nobody had recorded
    assert solution.answer == "Done."
    assert again.asked == policy.asked[2:]


def test_a_resumed_attempt_makes_the_calls_of_stateful_tools_again_to_build_up_their_state() -> None:
    script = (said("write", word="a"), said("write", word="b"), "Done.")
    journal = Records()
    policy = Scripted(*script)
    play(policy, Bench(), session(policy, journal))
    bench = Bench()
    _, again = resumed(bench, journal.appended[:2], "Done.")
    assert bench.closed == ["a b"]
    assert again.asked == policy.asked[2:]


def test_a_stateful_tool_that_answers_differently_makes_the_attempt_start_anew() -> None:
    journal = Records()
    policy = Scripted(said("write", word="a"), "Done.")
    play(policy, Bench(), session(policy, journal))
    changed = [
        msgspec.structs.replace(
            entry, before=entry.before and msgspec.structs.replace(entry.before, observation='["other"]')
        )
        for entry in journal.appended
    ]
    with pytest.raises(ReplayDiffers):
        resumed(Bench(), changed, "Done.")
