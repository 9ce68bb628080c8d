"""Levels that teach are played again (F66). Pure: no environment, no event loop."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.rollout.draws import GroupOutcome, RecordedDraws
from rollwright.rollout.groups import Draw, Group
from rollwright.rollout.settings import TaskSamplerConfig
from rollwright.rollout.teaching import Teaching, members_to_differ
from rollwright.trajectory import Trajectory

SIZE = 8


def play(rate: float, members: int, chance: Random, tokens: int = 10) -> GroupOutcome:
    solved = sum(chance.random() < rate for _ in range(members))
    return GroupOutcome(solved / members, members, tokens * members)


def test_levels_in_the_band_are_drawn_again_by_how_much_they_teach() -> None:
    """Forty levels: a quarter is never solved, a quarter always, a quarter half of the time, a quarter seldom."""
    rates = {level: (0.0, 1.0, 0.5, 0.2)[level % 4] for level in range(40)}
    sampler, world, visits = Teaching(TaskSamplerConfig(explore=0.2), SIZE), Random(1), Counter[float]()
    fresh = 0
    for index in range(4000):
        choice = sampler.choose("A", Random(index))
        level = fresh % 40 if choice.level is None else choice.level
        fresh += choice.level is None
        visits[rates[level]] += choice.level is not None
        sampler.observe("A", level, play(rates[level], SIZE, world))
    assert 0.15 < fresh / 4000 < 0.3, "a fifth explores, and nothing is in the band at first"
    assert visits[0.5] + visits[0.2] > 0.95 * visits.total()
    assert 1.2 < visits[0.5] / visits[0.2] < 2.4, "the ratio of p(1-p) is 1.56"
    assert sampler.figures()["levels_known"] == 40


def test_a_level_is_not_in_two_groups_at_once_and_returns_without_an_outcome() -> None:
    sampler = Teaching(TaskSamplerConfig(explore=0.0), SIZE)
    sampler.observe("A", 7, GroupOutcome(0.5, SIZE, 80))
    assert sampler.choose("A", Random(1)).level == 7
    assert sampler.choose("A", Random(2)).level is None
    assert sampler.choose("B", Random(2)).level is None, "another tag has levels of its own"
    sampler.release("A", 7)
    assert sampler.choose("A", Random(3)).level == 7


def test_a_level_that_is_learned_leaves_the_band() -> None:
    sampler = Teaching(TaskSamplerConfig(explore=0.0), SIZE)
    sampler.observe("A", 7, GroupOutcome(0.5, SIZE, 80))
    for visit in range(3):
        assert sampler.choose("A", Random(visit)).level == 7, visit
        sampler.observe("A", 7, GroupOutcome(1.0, SIZE, 80))
        if not sampler.figures()["levels_in_band"]:
            break
    assert sampler.choose("A", Random(9)).level is None


@given(st.floats(0.001, 0.999), st.floats(0.01, 0.999))
def test_a_group_has_the_fewest_members_that_differ_as_often_as_asked_for(rate: float, wanted: float) -> None:
    members = members_to_differ(rate, wanted)
    assert 1 - rate**members - (1 - rate) ** members >= wanted - 1e-12
    fewer = members - 1
    assert members == 2 or 1 - rate**fewer - (1 - rate) ** fewer < wanted


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sizes_of_groups_adapt_within_the_budget_of_tokens(seed: int) -> None:
    settings = TaskSamplerConfig(explore=0.3, largest_group=32)
    sampler, world = Teaching(settings, SIZE), Random(seed)
    sizes: dict[float, list[int]] = {0.5: [], 0.15: []}
    fixed = spent = 0
    for index in range(3000):
        choice = sampler.choose("A", Random(seed * 10_000 + index))
        level = world.randrange(200) if choice.level is None else choice.level
        rate, tokens = (0.5, 10) if level % 2 else (0.15, 20)
        assert choice.members is not None
        assert settings.smallest_group <= choice.members <= 32
        if choice.level is not None:
            sizes[rate].append(choice.members)
        spent += choice.members * tokens
        fixed += SIZE * tokens
        sampler.observe("A", level, play(rate, choice.members, world, tokens))
    mean = {rate: sum(each) / len(each) for rate, each in sizes.items()}
    assert mean[0.5] < SIZE < mean[0.15]
    assert spent <= fixed * 1.02 + 8 * SIZE * 20, "no more than groups of one size would have taken"


def recorded(settings: TaskSamplerConfig, rows: list[dict[str, object]]) -> RecordedDraws:
    return RecordedDraws(
        5,
        SIZE,
        lambda tag, index: -index,
        sampler=Teaching(settings, SIZE),
        ordered=lambda tag, place: place,
        write=lambda row: rows.append(dict(row)),
    )


def finished(draws: RecordedDraws, index: int, draw: Draw, solved: float) -> None:
    members = {
        each: Trajectory(
            f"g{index}-m{each}", "1", f"g{index}", draw.tag, draw.level, success=each < solved * SIZE
        )
        for each in range(SIZE)
    }
    draws.observe(Group(f"g{index}", index, draw.tag, draw.level, SIZE, finished=members))


@given(stops=st.lists(st.integers(0, 59), max_size=4, unique=True))
def test_a_run_that_was_killed_draws_the_groups_that_it_would_have_drawn(stops: list[int]) -> None:
    """Killed anywhere: before a batch has ended, with groups drawn and not played."""
    settings = TaskSamplerConfig(explore=0.3, largest_group=16)

    def run(stops: list[int]) -> list[Draw]:
        rows: list[dict[str, object]] = []
        draws = recorded(settings, rows)
        groups: dict[int, Draw] = {}
        batch: list[int] = []
        for index in range(60):
            groups[index] = draws("A", index)
            batch.append(index)
            if index in stops:
                draws = recorded(settings, rows)
                draws.restore(list(rows))
                for (
                    each
                ) in batch:  # the scheduler opens again what was not handed out, and replays its results
                    assert draws("A", each) == groups[each]
            if len(batch) == 4:
                for each in reversed(batch):
                    finished(draws, each, groups[each], (groups[each].level % 5) / 4)
                draws.end_batch()
                batch = []
        return list(groups.values())

    assert run(stops) == run([])
    assert any(draw.level != place for place, draw in enumerate(run([]))), "some level was drawn again"


def test_a_group_that_was_learned_from_counts_once() -> None:
    rows: list[dict[str, object]] = []
    draws = recorded(TaskSamplerConfig(), rows)
    draw = draws("A", 0)
    for _ in range(2):
        finished(draws, 0, draw, 0.5)
        draws.end_batch()
    assert [row.get("solved") for row in rows] == [None, 0.5]
    again = recorded(TaskSamplerConfig(), [])
    again.restore(rows)
    finished(again, 0, draw, 1.0)
    again.end_batch()
    assert again.figures() == draws.figures()
