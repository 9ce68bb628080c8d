"""Mathematics compared by math-verify in a process of its own, which evaluates nothing of an answer."""

from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec

import pytest

from rollwright.errors import ConfigError
from rollwright.rewards import RewardFailure, Rewards
from rollwright.trajectory import Trajectory

Attempts = Callable[..., Trajectory]

is_there = find_spec("math_verify") is not None

needs_math_verify = pytest.mark.skipif(not is_there, reason="math-verify is not installed")


@pytest.fixture
async def rewards() -> AsyncIterator[Rewards]:
    made = Rewards.build("math_verify")
    yield made
    await made.close()


@pytest.mark.skipif(is_there, reason="math-verify is installed")
def test_without_the_package_the_settings_are_refused_and_say_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"reward math_verify: .*pip install rollwright\[rewards\]"):
        Rewards.build("math_verify")


@needs_math_verify
@pytest.mark.parametrize(
    ("right", "answer", "expected"),
    [
        ("1/2", "The answer is 0.5", 1),
        ("1/2", r"So \boxed{\frac{2}{4}}.", 1),
        ("0.5", "1/3", 0),
        (r"\frac{\sqrt{2}}{2}", r"$\frac{1}{\sqrt{2}}$", 1),
        (r"$x^2 + 2x + 1$", r"\boxed{(x+1)^2}", 1),
        (r"\{1, 2, 3\}", r"$\{3, 2, 1\}$", 1),
        (r"(1, 2)", r"$(2, 1)$", 0),
        ("2^10", "1024", 1),
        (["7", "8"], "It is 8.", 1),
        (12, r"\boxed{12}", 1),
        ("12", "I do not know", 0),
        ("12", "", 0),
        ("12", "1" * 30_000, 0),
    ],
)
async def test_equal_mathematics_is_right(
    rewards: Rewards, right: object, answer: str, expected: float, attempt_with: Attempts
) -> None:
    assert (await rewards.evaluate({"answer": right}, attempt_with(answer))).total == expected


@needs_math_verify
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os')._exit(0)",
        r"\boxed{__import__('os').system('true')}",
        "(1).__class__.__base__.__subclasses__()",
        "answer: [print(12) for x in (1,)]",
        r"$\text{exec}('raise SystemExit')$",
        "\ud800 12 13",
    ],
)
async def test_code_in_an_answer_is_text(rewards: Rewards, answer: str, attempt_with: Attempts) -> None:
    assert (await rewards.evaluate({"answer": "12345"}, attempt_with(answer))).total == 0


@needs_math_verify
@pytest.mark.parametrize("answer", ["9**9**9**9", r"$9^{9^{9^{9}}}$", r"\boxed{(((10^{10})^{10})^{10})!}"])
async def test_an_answer_that_takes_too_much_is_not_verified(answer: str, attempt_with: Attempts) -> None:
    rewards = Rewards.build([{"kind": "math_verify", "cpu_seconds": 2}])
    try:
        assert (await rewards.evaluate({"answer": "12"}, attempt_with(answer))).total == 0
        assert (await rewards.evaluate({"answer": "12"}, attempt_with("12"))).total == 1
    finally:
        await rewards.close()


@needs_math_verify
async def test_a_task_that_is_not_mathematics_is_a_failure(rewards: Rewards, attempt_with: Attempts) -> None:
    with pytest.raises(RewardFailure, match="reward math_verify: the task's 'answer'"):
        await rewards.evaluate({"answer": ""}, attempt_with("12"))
    with pytest.raises(RewardFailure, match="holds a dict"):
        await rewards.evaluate({"answer": {}}, attempt_with("12"))
