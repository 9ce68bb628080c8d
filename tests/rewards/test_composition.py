"""A list of rewards: a weighted sum with its components kept, or a failure with a name. Never a 0 for a failure."""

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.rewards import RewardFailure, Rewards, ScoredAttempt, parse_rewards, reward
from rollwright.rewards.settings import REWARDS
from rollwright.trajectory import UNDELIVERED, Message, Trajectory

Attempts = Callable[..., Trajectory]

TASK = {"question": "2+2?", "answer": "4"}


def correct(task: dict[str, Any], answer: str) -> float:
    return float(answer == task["answer"])


class Longer:
    """A reward of the user's that keeps something."""

    def __init__(self, than: int = 3) -> None:
        self.than = than
        self.closed = False

    async def evaluate(self, attempt: ScoredAttempt) -> float:
        return float(len(attempt.answer) > self.than)

    async def close(self) -> None:
        self.closed = True


class NoClose:
    async def evaluate(self, attempt: ScoredAttempt) -> float:
        return 1.0


@pytest.fixture
def user_module() -> Any:
    """A module of the user's, which settings name as `module:name`."""
    module = ModuleType("my_rewards")
    module.correct = correct  # type: ignore[attr-defined]
    module.named = reward(name="right", weight=0.5, time_limit=7)(lambda answer: 1.0)  # type: ignore[attr-defined]
    module.asks_too_much = lambda task, weather: 1.0  # type: ignore[attr-defined]
    module.number = 4  # type: ignore[attr-defined]
    module.Longer, module.NoClose = Longer, NoClose  # type: ignore[attr-defined]
    module.at_least = lambda answer, *, least=1: float(len(answer) >= least)  # type: ignore[attr-defined]
    sys.modules["my_rewards"] = module
    yield module
    del sys.modules["my_rewards"]


async def total(rewards: Any, trajectory: Trajectory, task: dict[str, Any] = TASK) -> float:
    return (await Rewards.build(rewards).evaluate(task, trajectory)).total


async def test_the_total_is_the_weighted_sum_and_components_keep_the_values(attempt_with: Attempts) -> None:
    @reward(weight=2.0)
    async def quality(trajectory: Trajectory) -> dict[str, float]:
        return {"tone": 0.5, "clarity": 0.25}

    rewards = Rewards.build([quality, correct, {"kind": "length", "limit": 0, "ramp": 2, "weight": 0.1}])
    result = await rewards.evaluate(TASK, attempt_with("4"))
    assert result.components == {"quality.clarity": 0.25, "quality.tone": 0.5, "correct": 1.0, "length": -0.5}
    assert list(result.components) == ["quality.clarity", "quality.tone", "correct", "length"]
    assert result.total == pytest.approx(2.0 * 0.75 + 1.0 - 0.05)


async def test_a_result_is_stored_in_the_trajectory(attempt_with: Attempts) -> None:
    trajectory = attempt_with("4")
    result = await Rewards.build(correct).evaluate(TASK, trajectory)
    stored = Trajectory.from_bytes(result.store_in(trajectory).to_bytes())
    assert (stored.reward, stored.components) == (1.0, {"correct": 1.0})
    again = await Rewards.build(correct).evaluate(TASK, stored)
    assert again == result


async def test_a_function_gets_the_parameters_that_it_declares(attempt_of_two_turns: Trajectory) -> None:
    seen: dict[str, Any] = {}

    def look(
        *, messages: tuple[Message, ...], answer: str, returned: Any, task: Any, bonus: float = 0.5
    ) -> float:
        seen.update(messages=messages, answer=answer, returned=returned, task=task)
        return bonus

    attempt_of_two_turns.returned = '{"moves": 2}'
    assert await total(look, attempt_of_two_turns) == 0.5
    assert seen["answer"] == "swim"
    assert seen["returned"] == {"moves": 2}
    assert seen["task"] == TASK
    assert [(each.role, each.content) for each in seen["messages"]] == [
        ("user", "go"),
        ("assistant", "look"),
        ("user", "a lake"),
        ("assistant", "swim"),
    ]


async def test_a_stored_conversation_is_preferred_and_returned_text_is_the_answer(
    attempt_with: Attempts,
) -> None:
    trajectory = attempt_with("draft", returned="final")
    trajectory.conversation = (Message("user", "q"), Message("assistant", "final"))

    def check(answer: str, messages: tuple[Message, ...]) -> float:
        return float(answer == "final" and messages == trajectory.conversation)

    assert await total(check, trajectory) == 1.0


async def test_an_answer_that_reached_nobody_is_not_the_answer(attempt_of_two_turns: Trajectory) -> None:
    turns = attempt_of_two_turns.turns
    turns[1] = msgspec.structs.replace(turns[1], filtered=UNDELIVERED)
    assert await total(lambda answer: answer == "look", attempt_of_two_turns) == 1.0


async def test_an_attempt_without_a_turn_has_an_empty_answer() -> None:
    assert await total(lambda answer: answer == "", Trajectory("r", "a", "g", "t", 0)) == 1.0


async def test_a_task_that_one_function_changes_is_unchanged_for_the_next(attempt_with: Attempts) -> None:
    def spoil(task: dict[str, Any]) -> float:
        task.clear()
        return 0.0

    assert await total([spoil, correct], attempt_with("4")) == 1.0


def test_settings_name_functions_by_path_and_override_the_decorator(user_module: Any) -> None:
    plain, named, renamed = Rewards.build(
        [
            "my_rewards:correct",
            "my_rewards:named",
            {"kind": "function", "function": "my_rewards:named", "name": "other", "weight": 3},
        ]
    ).rewards
    assert (plain.name, plain.weight, plain.time_limit) == ("correct", 1.0, 30.0)
    assert (named.name, named.weight, named.time_limit) == ("right", 0.5, 7)
    assert (renamed.name, renamed.weight, renamed.time_limit) == ("other", 3.0, 7)


async def test_a_class_or_function_of_the_user_is_a_kind_made_with_its_options(
    user_module: Any, attempt_with: Attempts
) -> None:
    rewards = Rewards.build(
        [
            {"kind": "my_rewards:Longer", "options": {"than": 4}, "weight": 2},
            {"kind": "my_rewards:at_least", "options": {"least": 5}},
        ]
    )
    result = await rewards.evaluate(TASK, attempt_with("four!"))
    assert result.components == {"Longer": 1.0, "at_least": 1.0}
    assert result.total == 3.0
    await rewards.close()
    (longer, _) = rewards.rewards
    assert isinstance(longer.component, Longer)
    assert longer.component.closed


async def test_an_installed_package_offers_rewards_by_an_entry_point(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    user_module: Any,
    attempt_with: Attempts,
) -> None:
    info = tmp_path / "offers_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offers-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollwright.rewards]\nlonger = my_rewards:Longer\n")
    monkeypatch.syspath_prepend(tmp_path)
    REWARDS.refresh()
    request.addfinalizer(REWARDS.refresh)
    result = await Rewards.build(["longer"]).evaluate(TASK, attempt_with("four!"))
    assert result.components == {"longer": 1.0}


@pytest.mark.parametrize(
    ("given_reward", "says"),
    [
        (
            "my_rewards:asks_too_much",
            r"unknown parameter 'weather'; accepted: task, trajectory, answer, messages",
        ),
        (
            "my_rewards:absent",
            r"reward my_rewards:absent: cannot be imported: module 'my_rewards' has no 'absent'",
        ),
        (
            "no_such_module:f",
            r"reward no_such_module:f: cannot be imported: no module named 'no_such_module'",
        ),
        ("my_rewards:number", r"is a int; a function is accepted"),
        ("exact_mach", r"rewards\[0\]: kind: unknown `exact_mach` \(did you mean `exact_match`\?\)"),
        ({"kind": "function", "function": "exact_mach"}, r"reward: unknown `exact_mach`"),
        ({"kind": "my_rewards:Longer", "options": {"tham": 3}}, r"my_rewards:Longer: unknown setting 'tham'"),
        ({"kind": "my_rewards:NoClose"}, r"my_rewards:NoClose: has `evaluate` but no method `close`"),
        ({"kind": "regex", "pattern": "("}, r"reward regex: pattern: not a regular expression"),
        ({"kind": "regex", "patern": "a"}, r"rewards\[0\].regex.pat"),
        ({"kind": "exact_match", "name": "a.b"}, r"rewards\[0\].exact_match.name"),
        ({"kind": "exact_match", "weight": math.nan}, r"rewards\[0\].exact_match.weight"),
        ({"kind": "contains"}, r"texts: either this or field"),
        ({"kind": "json_schema", "json_schema": {"type": 3}}, r"json_schema is not a schema"),
        ({"kind": "judge", "rubric": "good?"}, r"reward judge: a judge needs a policy"),
    ],
)
def test_wrong_settings_are_one_line_that_names_the_reward(
    given_reward: Any, says: str, user_module: Any
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Rewards.build([given_reward])
    assert "\n" not in str(caught.value)


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two rewards have the name 'exact_match'"):
        parse_rewards(["exact_match", "exact_match"])
    with pytest.raises(ConfigError, match="two have the name 'correct'"):
        Rewards.build([correct, {"kind": "exact_match", "name": "correct"}])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "a.b"}, "reward 'a.b': a name has letters"),
        ({"weight": math.nan}, "reward f: its weight is nan"),
        ({"weight": "1"}, "reward f: its weight is a str"),
        ({"time_limit": 0}, "reward f: its time_limit is 0; a number above 0 is accepted"),
    ],
)
def test_wrong_options_of_the_decorator_are_one_line(options: dict[str, Any], says: str) -> None:
    def f(answer: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=says):
        Rewards.build(reward(**options)(f))


def test_the_decorator_refuses_a_function_that_asks_for_something_unknown() -> None:
    with pytest.raises(ConfigError, match="reward f: unknown parameter 'state'"):

        @reward
        def f(task: Any, state: Any) -> float:
            return 1.0


async def test_objects_and_partial_functions_are_functions(attempt_with: Attempts) -> None:
    class Similar:
        async def __call__(self, answer: str) -> float:
            return 0.25

    def near(answer: str, bonus: float) -> float:
        return bonus

    result = await Rewards.build([Similar(), partial(near, bonus=0.5)]).evaluate(TASK, attempt_with())
    assert result.components == {"Similar": 0.25, "near": 0.5}


@pytest.mark.parametrize(
    "value",
    [None, "1", math.nan, math.inf, 1e300, [1.0], {}, {"a": None}, {"a": math.nan}, {1: 1.0}, {"": 1.0}, 1j],
)
async def test_what_is_not_a_finite_number_is_a_failure(value: Any, attempt_with: Attempts) -> None:
    def odd(answer: str) -> Any:
        return value

    with pytest.raises(RewardFailure, match=r"^reward odd: ") as caught:
        await total([correct, odd], attempt_with())
    assert caught.value.reward == "odd"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [True, np.float32(1), np.int64(1), {"a": np.float64(0.5), "b": 0.5}])
async def test_numbers_of_any_type_are_accepted(value: Any, attempt_with: Attempts) -> None:
    assert await total(lambda answer: value, attempt_with()) == 1.0


@pytest.mark.parametrize(
    "error",
    [
        ValueError("two\nlines"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError("mine"),
        StopIteration(),
        GeneratorExit(),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_whatever_a_function_raises_is_its_failure(
    error: BaseException, is_async: bool, attempt_with: Attempts
) -> None:
    def plain(answer: str) -> float:
        raise error

    async def slow(answer: str) -> float:
        raise error

    with pytest.raises(RewardFailure, match=r"^reward (plain|slow): raised ") as caught:
        await total([slow if is_async else plain], attempt_with())
    assert "\n" not in str(caught.value)


async def test_the_first_failure_in_the_list_is_reported_whichever_comes_first(
    attempt_with: Attempts,
) -> None:
    async def late(answer: str) -> float:
        await asyncio.sleep(0.05)
        raise ValueError("late")

    async def early(answer: str) -> float:
        raise ValueError("early")

    with pytest.raises(RewardFailure, match=r"^reward late: raised ValueError: late$"):
        await total([late, early], attempt_with())


async def test_a_function_that_hangs_is_a_failure_even_if_it_refuses_to_stop(attempt_with: Attempts) -> None:
    let_go = asyncio.Event()

    @reward(time_limit=0.05)
    async def stubborn(answer: str) -> float:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    with pytest.raises(RewardFailure, match=r"^reward stubborn: gave no value within 0.05 s$"):
        await total(stubborn, attempt_with())
    let_go.set()
    await asyncio.sleep(0)


async def test_a_plain_function_that_blocks_stops_nobody_else(attempt_with: Attempts) -> None:
    let_go = threading.Event()

    def blocking(answer: str) -> float:
        assert let_go.wait(60), "the event loop stood still"
        return 1.0

    async def beside(answer: str) -> float:
        let_go.set()
        return 1.0

    assert await total([blocking, beside], attempt_with()) == 2.0


async def test_threads_that_hang_do_not_pile_up(attempt_with: Attempts) -> None:
    let_go = threading.Event()
    began: list[str] = []

    @reward(time_limit=0.05)
    def stuck(answer: str) -> float:
        began.append(answer)
        let_go.wait(60)
        return 1.0

    user = ModuleType("stuck_rewards")
    user.stuck = stuck  # type: ignore[attr-defined]
    sys.modules["stuck_rewards"] = user
    rewards = Rewards.build([{"kind": "function", "function": "stuck_rewards:stuck", "concurrency": 2}])
    try:
        for _ in range(5):
            with pytest.raises(RewardFailure, match="gave no value within"):
                await rewards.evaluate(TASK, attempt_with())
        assert len(began) == 2
        let_go.set()
        until = time.monotonic() + 60
        while True:  # once they have ended, calls run again
            try:
                assert (await rewards.evaluate(TASK, attempt_with())).total == 1.0
                break
            except RewardFailure:
                assert time.monotonic() < until
    finally:
        del sys.modules["stuck_rewards"]


async def test_cancelling_an_evaluation_cancels_its_functions(attempt_with: Attempts) -> None:
    ended = asyncio.Event()
    began = asyncio.Event()

    async def waits(answer: str) -> float:
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()
        return 1.0

    evaluation = asyncio.ensure_future(Rewards.build(waits).evaluate(TASK, attempt_with()))
    await began.wait()
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluation
    await asyncio.wait_for(ended.wait(), 60)


async def test_a_total_that_is_no_reward_is_a_failure(attempt_with: Attempts) -> None:
    big = reward(name="big", weight=10.0)(lambda answer: 9e17)
    with pytest.raises(RewardFailure, match=r"^reward total: "):
        await total(big, attempt_with())


async def test_a_branch_of_a_tree_is_scored_by_its_own_answer(attempt_of_two_turns: Trajectory) -> None:
    turns = attempt_of_two_turns.turns
    turns.append(msgspec.structs.replace(turns[1], id=2, text="walk"))
    rewards = Rewards.build(lambda answer: float(answer == "swim"))
    assert (await rewards.evaluate(TASK, attempt_of_two_turns, leaf=1)).total == 1.0
    assert (await rewards.evaluate(TASK, attempt_of_two_turns, leaf=2)).total == 0.0


numbers = st.floats(-1e6, 1e6)
names = st.text("abcdef", min_size=1, max_size=5)
values = st.one_of(numbers, st.dictionaries(names, numbers, min_size=1, max_size=4))
lists = st.lists(st.tuples(names, numbers, values), max_size=6, unique_by=lambda each: each[0])


@given(lists)
def test_any_list_gives_all_components_in_order_and_their_weighted_sum(
    parts: list[tuple[str, float, Any]],
) -> None:
    def function_of(value: Any) -> Callable[..., Any]:
        async def give(answer: str) -> Any:
            await asyncio.sleep(0)
            return value

        return give

    trajectory = Trajectory("r", "a", "g", "t", 0)
    rewards = Rewards.build([reward(name=n, weight=w)(function_of(v)) for n, w, v in parts])
    result = asyncio.run(rewards.evaluate({}, trajectory))
    expected: dict[str, tuple[float, float]] = {}
    for name, weight, value in parts:
        named = (
            {f"{name}.{key}": value[key] for key in sorted(value)}
            if isinstance(value, dict)
            else {name: value}
        )
        expected |= {key: (weight, each) for key, each in named.items()}
    assert list(result.components.items()) == [(key, value) for key, (_, value) in expected.items()]
    assert result.total == pytest.approx(sum(weight * value for weight, value in expected.values()))
