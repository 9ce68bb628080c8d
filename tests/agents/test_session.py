"""A session's turns have their places when they are asked for, however their answers come in."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rollwright.agents import EpisodeFailure, JournalEntry, ReplayDiffers, Session
from rollwright.aio import run_virtual
from rollwright.engines.base import EngineError, Generation, Prompt, Sampling, ToolSpec
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.envs.base import Step
from rollwright.trajectory import (
    FinishReason,
    Message,
    TokenIds,
    Trajectory,
    Turn,
    VersionRun,
    check,
    floats,
    full_prompt,
)

RENDERER = BytesRenderer()


class Echo:
    """Answers with the place it was asked at; how long it takes is in the prompt's last word."""

    version = 0
    pressure = 0

    def __init__(self, renderer: BytesRenderer | None = RENDERER) -> None:
        self.renderer = renderer
        self.asked: list[Prompt] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        self.asked.append(prompt)
        said = RENDERER.decode(prompt.ids) if prompt.ids is not None else prompt.messages[-1].content
        seconds = float(said.split()[-1])
        await asyncio.sleep(abs(seconds))
        if seconds < 0:
            raise EngineError("as the prompt asked")
        text = f"{prompt.key[-1]}"
        ids = RENDERER.encode(text)
        return Generation(text, ids, floats([-1.0]) * len(ids), (VersionRun(0, len(ids)),))

    async def close(self) -> None:
        """Holds nothing."""


class Records:
    """A journal in memory."""

    def __init__(self, recorded: Sequence[JournalEntry] = ()) -> None:
        self.recorded = {entry.place: entry for entry in recorded}
        self.appended: list[JournalEntry] = []

    async def append(self, entry: JournalEntry) -> None:
        self.appended.append(JournalEntry.from_bytes(entry.to_bytes()))


def session(policy: Any = None, journal: Any = None) -> Session:
    trajectory = Trajectory("r", "a", "g", "Lab", seed=1)
    return Session(
        trajectory,
        policy or Echo(),
        Sampling(),
        ("key",),
        sequence_length=10_000,
        generate_timeout=1e6,
        journal=journal,
    )


def asks(seconds: float) -> list[Message]:
    return [Message("user", f"take {seconds}")]


def test_calls_at_the_same_time_stand_in_the_order_they_were_asked_for() -> None:
    async def play(times: Sequence[float]) -> Trajectory:
        one = session()
        await asyncio.gather(*(one.generate(asks(seconds)) for seconds in times))
        return one.seal()

    slow_first, fast_first = run_virtual(play([9, 5, 1])), run_virtual(play([1, 5, 9]))
    assert [turn.after for turn in slow_first.turns] == [None, 0, 1]
    assert [turn.text for turn in slow_first.turns] == [turn.text for turn in fast_first.turns]


def test_calls_at_the_same_time_take_the_time_of_the_longest() -> None:
    async def play() -> float:
        one = session()
        await asyncio.gather(*(one.generate(asks(seconds)) for seconds in (9, 5, 1)))
        return asyncio.get_running_loop().time()

    assert run_virtual(play()) == pytest.approx(9, abs=0.1)


async def grow(one: Session, times: Sequence[float]) -> Trajectory:
    """A root with a child for each time, each with a child of its own."""
    root = await one.generate(asks(1), after=None)

    async def branch(seconds: float) -> None:
        child = await one.generate(asks(seconds), continues=root, after=root)
        await one.generate(asks(seconds), continues=child, after=child)

    await asyncio.gather(*(branch(seconds) for seconds in times))
    return one.seal()


def test_a_tree_comes_out_the_same_however_fast_its_branches_grow() -> None:
    slow_first = run_virtual(grow(session(), [9, 1]))
    fast_first = run_virtual(grow(session(), [1, 9]))
    for grown in (slow_first, fast_first):
        check(grown)
        assert [(turn.after, turn.extends) for turn in grown.turns] == [
            (None, None),
            (0, 0),
            (1, 1),
            (0, 0),
            (3, 3),
        ]
    assert [turn.text for turn in slow_first.turns] == [turn.text for turn in fast_first.turns]


def test_a_tree_keeps_every_prompt_after_it_is_put_in_order() -> None:
    policy = Echo()
    grown = run_virtual(grow(session(policy), [9, 1, 5]))
    sent = {tuple(prompt.ids or ()) for prompt in policy.asked}
    assert {tuple(full_prompt(grown.turns, turn.id)) for turn in grown.turns} == sent


def test_a_call_that_failed_is_skipped_by_those_behind_it() -> None:
    async def play() -> list[Any]:
        one = session()
        ended = await asyncio.gather(
            *(one.generate(asks(seconds)) for seconds in (3, -5, 1)), return_exceptions=True
        )
        await one.generate(asks(1))
        return [ended, one.seal()]

    ended, trajectory = run_virtual(play())
    assert isinstance(ended[1], EpisodeFailure)
    assert [turn.after for turn in check(trajectory).turns] == [None, 0, 1]


def test_a_half_grown_tree_goes_on_from_its_journal() -> None:
    first = Records()
    whole = run_virtual(grow(session(journal=first), [2, 1, 3]))
    assert len(first.appended) == 7
    for kept in (first.appended[:4], first.appended[2:6], first.appended[::2]):
        policy, journal = Echo(), Records(kept)
        again = run_virtual(grow(session(policy, journal), [2, 1, 3]))
        assert again.turns == whole.turns
        assert len(policy.asked) == 7 - len(kept)
        assert not journal.recorded


def test_a_journal_of_another_question_is_of_no_use() -> None:
    first = Records()
    run_virtual(grow(session(journal=first), [2, 1]))
    with pytest.raises(ReplayDiffers):
        run_virtual(grow(session(journal=Records(first.appended)), [2, 4]))


class Forgetful(BytesRenderer):
    """A format that can never be continued, and that knows of tools."""

    def extend(
        self,
        prompt: TokenIds,
        sampled: TokenIds,
        finish: FinishReason,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        return None


def test_a_format_that_cannot_be_continued_starts_a_new_sequence_and_is_counted() -> None:
    async def play() -> tuple[Turn, Turn, Trajectory]:
        one = session(Echo(Forgetful()))
        first = await one.generate(asks(1))
        second = await one.generate(asks(2), continues=first)
        return first, second, one.seal()

    first, second, trajectory = run_virtual(play())
    assert (second.after, second.extends) == (first.id, None)
    whole = [*asks(1), Message("assistant", first.text), *asks(2)]
    assert full_prompt(trajectory.turns, second.id) == RENDERER.open(whole)
    assert trajectory.metrics == {"sequences_restarted": 1.0}


def test_what_the_environment_answers_belongs_to_its_turn_in_a_tree() -> None:
    async def play() -> Trajectory:
        one = session()
        root = await one.generate(asks(1), after=None)

        async def branch(seconds: float, reward: float) -> None:
            child = await one.generate(asks(seconds), continues=root, after=root)
            one.observe(child, Step("", reward, True, False, {}))

        await asyncio.gather(branch(5, 1.0), branch(2, 0.0))
        return one.seal()

    grown = run_virtual(play())
    assert [turn.outcome.reward for turn in grown.turns if turn.outcome] == [1.0, 0.0]
    assert grown.reward == 0.5
