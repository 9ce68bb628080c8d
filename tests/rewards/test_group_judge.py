"""A model that ranks the answers of a group: fair to every place in the list, and to equal answers."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.rewards import GroupJudge, RewardFailure, Rewards
from rollwright.rewards.group_judge import parse_ranking
from rollwright.rewards.judge import Unparsed
from rollwright.rewards.settings import GroupJudgeReward
from rollwright.trajectory import Message, Trajectory, Turn

Attempts = Callable[..., Trajectory]

TASK = {"question": "A large number?"}


@pytest.mark.parametrize(
    ("reply", "values"),
    [
        ("ranking: 2 > 1 > 3", [0.5, 1.0, 0.0]),
        ("Answer 3 is best.\nRanking: 3, 1, 2", [0.5, 0.0, 1.0]),
        ("1 = 2 > 3", [0.75, 0.75, 0.0]),
        ("1=2=3", [0.5, 0.5, 0.5]),
        ("**ranking: 1 > 2 > 3**", [1.0, 0.5, 0.0]),
    ],
)
def test_a_ranking_gives_values_evenly_between_one_and_zero(reply: str, values: list[float]) -> None:
    assert parse_ranking(reply, 3) == pytest.approx(values)


@pytest.mark.parametrize(
    "reply", ["", "1 > 2", "1 > 2 > 3 > 4", "1 > 1 > 2", "A > B > C", "1 > 2 > 3 is best", "0 > 1 > 2"]
)
def test_anything_else_is_no_ranking(reply: str) -> None:
    with pytest.raises(Unparsed):
        parse_ranking(reply, 3)


def shown_answers(messages: Sequence[Message]) -> list[str]:
    return re.findall(r"^<<<\w+>>>\n(.*)\n<<<\w+>>>$", messages[1].content, re.MULTILINE)


def rank_by_number(messages: Sequence[Message]) -> str:
    """A fair judge: larger numbers are better."""
    answers = shown_answers(messages)
    best_first = sorted(range(len(answers)), key=lambda at: -int(answers[at]))
    return "ranking: " + " > ".join(str(at + 1) for at in best_first)


def prefer_the_first(messages: Sequence[Message]) -> str:
    return "ranking: " + " > ".join(str(at + 1) for at in range(len(shown_answers(messages))))


def group_of(answers: Sequence[str]) -> list[Trajectory]:
    return [
        Trajectory("r", f"a{n}", "g", "t", 0, turns=[Turn(0, None, None, text=each, exact=False)])
        for n, each in enumerate(answers)
    ]


def judge_with(policy: Any, **options: Any) -> GroupJudge:
    return GroupJudge(GroupJudgeReward(kind="group_judge", rubric="Larger is better.", **options), policy)


async def test_members_are_ranked_against_each_other(scripted: Any) -> None:
    judge = judge_with(scripted(rank_by_number))
    assert await judge.rank(TASK, group_of(["3", "9", "1"])) == [0.5, 1.0, 0.0]


async def test_equal_answers_have_equal_values_and_are_shown_once(scripted: Any) -> None:
    policy = scripted(rank_by_number)
    assert await judge_with(policy).rank(TASK, group_of(["3", "9", "3"])) == [0.0, 1.0, 0.0]
    assert len(shown_answers(policy.prompts[0].messages)) == 2


async def test_a_group_without_a_difference_is_not_asked_about(scripted: Any) -> None:
    policy = scripted(rank_by_number)
    assert await judge_with(policy).rank(TASK, group_of(["3", "3"])) == [0.5, 0.5]
    assert await judge_with(policy).rank(TASK, group_of(["3"])) == [0.5]
    assert await judge_with(policy).rank(TASK, []) == []
    assert not policy.prompts


async def test_a_preference_for_a_place_cancels_out(scripted: Any) -> None:
    values = await judge_with(scripted(prefer_the_first)).rank(TASK, group_of(["1", "2", "3", "4"]))
    assert values == pytest.approx([0.5] * 4)


async def test_the_order_shown_depends_on_the_seed_alone(scripted: Any) -> None:
    orders = []
    for seed in range(6):
        policy = scripted(rank_by_number)
        await judge_with(policy, seed=seed, rounds=1).rank(TASK, group_of(["1", "2", "3", "4"]))
        again = scripted(rank_by_number)
        await judge_with(again, seed=seed, rounds=1).rank(TASK, group_of(["4", "2", "1", "3"]))
        orders.append(tuple(shown_answers(policy.prompts[0].messages)))
        assert orders[-1] == tuple(shown_answers(again.prompts[0].messages))
    assert len(set(orders)) > 1


async def test_the_same_group_is_asked_about_once(scripted: Any) -> None:
    policy = scripted(rank_by_number)
    judge = judge_with(policy, rounds=2)
    await judge.rank(TASK, group_of(["1", "2"]))
    await judge.rank(TASK, group_of(["2", "1", "1"]))
    assert len(policy.prompts) == 2


@given(st.lists(st.integers(0, 5).map(str), max_size=6), st.randoms(use_true_random=False))
def test_values_do_not_depend_on_the_order_of_the_members(answers: list[str], draws: Any) -> None:
    from rollwright.engines.base import Generation

    class Fair:
        renderer, version, pressure = None, 0, 0

        async def generate(self, prompt: Any, sampling: Any) -> Generation:
            return Generation(rank_by_number(prompt.messages), exact=False)

    order = list(range(len(answers)))
    draws.shuffle(order)
    straight = asyncio.run(judge_with(Fair()).rank(TASK, group_of(answers)))
    shuffled = asyncio.run(judge_with(Fair()).rank(TASK, group_of([answers[at] for at in order])))
    assert shuffled == [straight[at] for at in order]
    by_answer = dict(zip(answers, straight, strict=True))
    assert [by_answer[each] for each in answers] == straight
    assert not by_answer or sum(by_answer.values()) / len(by_answer) == pytest.approx(0.5)


async def test_a_group_judge_is_one_reward_of_a_list(scripted: Any) -> None:
    rewards = Rewards.build(
        [
            {"kind": "group_judge", "rubric": "Larger is better.", "weight": 2},
            {"kind": "contains", "texts": ["9"]},
        ],
        lambda settings: scripted(rank_by_number),
    )
    group = group_of(["3", "9"])
    low, high = await rewards.evaluate_group(TASK, group)
    assert (low.components, low.total) == ({"group_judge": 0.0, "contains": 0.0}, 0.0)
    assert (high.components, high.total) == ({"group_judge": 1.0, "contains": 1.0}, 3.0)
    alone = await rewards.evaluate(TASK, group[1])
    assert alone.components == {"contains": 1.0}


async def test_a_ranking_that_is_nonsense_is_a_failure(scripted: Any) -> None:
    rewards = Rewards.build(
        [{"kind": "group_judge", "rubric": "Larger is better.", "retries": 1}],
        lambda settings: scripted(lambda messages: "all fine"),
    )
    with pytest.raises(RewardFailure, match="reward group_judge: the judge gave no verdict in 2 replies"):
        await rewards.evaluate_group(TASK, group_of(["3", "9"]))
