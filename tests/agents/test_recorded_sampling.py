"""Every turn says how its tokens were drawn, whoever asked for it, and what an earlier release wrote still reads."""

from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import msgspec

from rollwright.agents import JournalEntry, Session
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.simulation.players import RandomPlayer
from rollwright.trajectory import (
    Message,
    SamplingParams,
    Trajectory,
    VersionRun,
    floats,
    samples,
    turn_samples,
)

OF_0_1_0 = (
    "UldUASi1L/1gOAAFCAA2kToxgLVJB3MhoBYghM4UPkOlCfUiApzwjcFo1IgkxZaS2i0EpSUWUGPRcBUhsf08ZZA0GS4ALAAuANnyTqkF+/kdshDyC7oH"
    "FbT6AXJgzeEmXejSYPRy0rtX1WDoPtYcPWkU6VYEuAmI6CCiQqFhXVdlmOVbciqz74RlQdYqBbihcO7UFoUqne/Uh9rz9B7pvgkFCk7SR8LhPEQ74rEq"
    "LXk/R6CBwqmN95HLBAMiAER0NPzQdZBGF0QcQMQFe+SkxZgBmP88E1PsvbJJ+66cNj8cYCCA7VL4QuTPL7X1iuz5oZjJJX16Uiq19aMGAMWJx4aEsHDe"
    "c4YtXzzRueYY"
)
JOURNAL_OF_0_1_0 = (
    "UldKAoOlcGxhY2UFpHR1cm7eAAuiaWQApWFmdGVywKdleHRlbmRzwKpwcm9tcHRfaWRz1wEBAAAAAgAAAKtzYW1wbGVkX2lkc9cBBwAAAAgAAACobG9n"
    "cHJvYnPXAgAAAL8AAIC+qHZlcnNpb25zkZIDAqR0ZXh0omFirXByb21wdF90b2tlbnMCsWNvbXBsZXRpb25fdG9rZW5zAqdvdXRjb21lgqtvYnNlcnZh"
    "dGlvbqRzZWVupnJld2FyZMs/8AAAAAAAAKhxdWVzdGlvbgk="
)


class Speaker:
    """Says a few bytes; with `told`, it says that the engine was told something else than was asked for."""

    renderer = BytesRenderer()
    version = 0
    pressure = 0

    def __init__(self, told: SamplingParams | None = None) -> None:
        self._told = told

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        ids = self.renderer.encode("said")
        stamps = (VersionRun(0, len(ids)),)
        return Generation("said", ids, floats([-0.5] * len(ids)), stamps, sampling=self._told)

    async def close(self) -> None: ...


class Records:
    def __init__(self, recorded: Sequence[JournalEntry] = ()) -> None:
        self.recorded = {entry.place: entry for entry in recorded}
        self.written: list[JournalEntry] = []

    async def append(self, entry: JournalEntry) -> None:
        self.written.append(JournalEntry.from_bytes(entry.to_bytes()))


def session_of(
    sampling: Sampling | None = None, policy: Any = None, journal: Records | None = None
) -> Session:
    trajectory = Trajectory("ro", "at", "g", "t", 0)
    return Session(
        trajectory,
        policy or Speaker(),
        sampling or Sampling(),
        ("k",),
        sequence_length=999,
        generate_timeout=9,
        journal=journal,
    )


ASKED = [Message("user", "go")]


async def test_a_turn_says_how_it_was_drawn_where_that_is_not_as_the_rollouts_are() -> None:
    session = session_of(Sampling(temperature=0.7))
    await session.generate(ASKED)
    await session.generate(ASKED, sampling=Sampling(temperature=0.7, max_tokens=9, stop=("x",)))
    await session.generate(ASKED, sampling=Sampling(temperature=0.2))
    await session.generate(ASKED, sampling=Sampling(temperature=0.7, top_p=0.9))
    trajectory = Trajectory.from_bytes(session.seal().to_bytes())
    assert trajectory.sampling == SamplingParams(temperature=0.7)
    drawn = [turn.sampling for turn in trajectory.turns]
    assert drawn == [None, None, SamplingParams(temperature=0.2), SamplingParams(0.7, 0.9)]


async def test_what_the_engine_was_told_counts_and_not_what_was_asked_for() -> None:
    session = session_of(policy=Speaker(SamplingParams(top_k=20)))
    await session.generate(ASKED)
    assert session.trajectory.turns[0].sampling == SamplingParams(top_k=20)
    assert session.trajectory.not_trainable == "sampled with top_k 20"
    same = session_of(policy=Speaker(SamplingParams()))
    await same.generate(ASKED)
    assert same.trajectory.turns[0].sampling is None


async def test_siblings_and_calls_of_a_tree_are_recorded_alike() -> None:
    session = session_of(Sampling(temperature=0.0))
    await session.generate_siblings(ASKED, 3)
    assert session.trajectory.not_trainable == "sampled at temperature 0"


async def test_only_tokens_that_a_trainer_can_compute_are_in_the_loss() -> None:
    session = session_of()
    one = await session.generate(ASKED)
    two = await session.generate(ASKED, continues=one, sampling=Sampling(temperature=0.0))
    await session.generate(ASKED, continues=two, sampling=Sampling(temperature=0.5))
    trajectory = session.seal()
    said = len(one.sampled_ids)
    for views in (samples(trajectory), turn_samples(trajectory)):
        trained = [
            round(heat, 3)
            for sample in views
            for heat, counts in zip(sample.temperatures, sample.mask, strict=True)
            if counts
        ]
        assert sorted(trained) == [0.5] * said + [1.0] * said
    assert trajectory.not_trainable is None
    assert trajectory.never_trained() == ["sampled at temperature 0"]


async def test_a_replayed_turn_keeps_how_it_was_drawn_when_the_next_attempt_has_other_settings() -> None:
    journal = Records()
    first = session_of(Sampling(temperature=0.0), journal=journal)
    await first.generate(ASKED)
    later = session_of(Sampling(temperature=1.0), journal=Records(journal.written))
    await later.generate(ASKED)
    assert later.replayed_turns == 1
    assert later.trajectory.turns[0].sampling == SamplingParams(temperature=0.0)
    assert later.trajectory.not_trainable == "sampled at temperature 0"
    same = session_of(Sampling(temperature=0.0), journal=Records(journal.written))
    await same.generate(ASKED)
    assert same.trajectory.turns[0].sampling is None


def test_what_0_1_0_wrote_is_read_and_trained_as_before() -> None:
    trajectory = Trajectory.from_bytes(b64decode(OF_0_1_0))
    assert (trajectory.sampling, trajectory.turns[0].sampling) == (None, None)
    assert trajectory.not_trainable is None
    (sample,) = samples(trajectory)
    assert list(sample.mask) == [0, 0, 1, 1]
    assert set(sample.temperatures) == {-1.0}
    assert Trajectory.from_bytes(trajectory.to_bytes()) == trajectory
    entry = JournalEntry.from_bytes(b64decode(JOURNAL_OF_0_1_0))
    assert (entry.sampling, entry.turn.sampling) == (None, None)


async def test_the_record_costs_a_few_bytes_for_a_whole_rollout() -> None:
    session = session_of(Sampling(temperature=0.7))
    for _ in range(100):
        await session.generate(ASKED)
    with_it = msgspec.msgpack.encode(session.trajectory.sampling)
    assert len(with_it) < 32
    assert all(turn.sampling is None for turn in session.trajectory.turns)


async def test_a_greedy_player_is_not_trainable_either() -> None:
    class Board:
        def actions(self) -> list[str]:
            return ["Up", "Down"]

        def best_action(self) -> None:
            return None

        def answer(self, action: str) -> str:
            return action

    trajectory = Trajectory("ro", "at", "g", "t", 0)
    session = Session(
        trajectory,
        RandomPlayer(),
        Sampling(temperature=0.0),
        ("k",),
        sequence_length=999,
        generate_timeout=9,
        env=Board(),
    )
    await session.generate(ASKED)
    assert trajectory.turns[0].exact
    assert trajectory.not_trainable == "sampled at temperature 0"
