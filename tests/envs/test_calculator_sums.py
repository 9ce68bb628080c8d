"""Sums with a calculator: a call, its result, an answer; held-out numbers are never trained on."""

import asyncio
import re

import pytest

from rollwright.envs import registry
from rollwright.envs.adapters.calculator_sums import CalculatorSums, pair_part
from rollwright.envs.base import Env, Step
from rollwright.envs.splits import Part
from rollwright.errors import ConfigError

TAG = "rollwright.envs.adapters.calculator_sums:CalculatorSums"


def played(seed: int, *answers: str, **options: object) -> tuple[str, list[Step]]:
    async def play() -> tuple[str, list[Step]]:
        env: Env = registry.make(TAG, options)
        question = (await env.reset(seed)).observation
        return question, [await env.step(each) for each in answers]

    return asyncio.run(play())


def asked(seed: int, **options: object) -> tuple[int, str, int, int]:
    """The two numbers, the sign between them, and the result."""
    question, _ = played(seed, **options)
    found = re.fullmatch(r"What is (\d+) (times|plus|minus) (\d+)\?", question)
    assert found is not None
    a, b = int(found[1]), int(found[3])
    sign = {"times": "*", "plus": "+", "minus": "-"}[found[2]]
    return a, sign, b, {"*": a * b, "+": a + b, "-": a - b}[sign]


@pytest.mark.parametrize("seed", range(6))
def test_the_result_of_a_call_is_told_and_the_last_number_of_an_answer_counts(seed: int) -> None:
    a, sign, b, result = asked(seed)
    _, (call, answer) = played(seed, f"{a} {sign} {b} = 7, I think", f"So it is {result}.")
    assert (call.observation, call.reward, call.terminated) == (str(result), 0.0, False)
    assert (answer.reward, answer.terminated, answer.info["success"]) == (1.0, True, True)
    _, (wrong,) = played(seed, f"{result + 1}")
    assert (wrong.reward, wrong.terminated) == (0.0, True)
    _, (nothing,) = played(seed, "I do not know")
    assert (nothing.reward, nothing.info["valid"]) == (0.0, False)


def test_calls_without_an_answer_end_at_the_limit() -> None:
    _, steps = played(0, "1 + 1", "1 + 1", "1 x 2", max_steps=3)
    assert [each.truncated for each in steps] == [False, False, True]
    assert [each.observation for each in steps] == ["2", "2", "2"]
    assert all(each.reward == 0 for each in steps)


def test_an_expression_that_cannot_be_computed_is_an_observation() -> None:
    _, (call,) = played(0, "007 * 3")
    assert "not an expression" in call.observation
    assert not call.terminated


def test_a_pair_of_numbers_is_of_one_part_in_any_order_and_with_anything_asked_of_it() -> None:
    assert all(pair_part(a, b) is pair_part(b, a) for a in range(11, 40) for b in range(11, 40))
    for part in (Part.TRAIN, Part.HELD_OUT):
        drawn = [asked(seed, part=part) for seed in range(80)]
        assert {pair_part(a, b) for a, _, b, _ in drawn} == {part}
        assert {sign for _, sign, _, _ in drawn} == {"*", "+", "-"}
        assert all(result > 0 for *_, result in drawn)


def test_a_fork_goes_on_alone() -> None:
    async def play() -> None:
        env = CalculatorSums()
        await env.reset(3)
        call = env.best_action()
        assert call is not None
        await env.step(call)
        copy = env.fork()
        assert (await copy.step("0")).reward == 0
        answer = env.best_action()
        assert answer is not None
        assert answer != call
        assert (await env.step(answer)).reward == 1

    asyncio.run(play())


def test_a_range_without_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="smallest and largest: 9 to 9 is no range of numbers"):
        registry.make(TAG, {"smallest": 9, "largest": 9})
