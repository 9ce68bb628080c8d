import sys

import pytest

from rollwright.envs import registry
from rollwright.envs.base import Forkable
from rollwright.envs.parsing import THINK_PATTERN
from rollwright.envs.registry import spec
from rollwright.errors import ConfigError, RollwrightError

DATASETS = [
    "basic_arithmetic",
    "countdown",
    "simple_equations",
    "n_queens",
    "word_ladder",
    "family_relationships",
]


@pytest.mark.parametrize("dataset", DATASETS)
async def test_the_known_answer_earns_everything(play, dataset: str) -> None:
    env = registry.make(f"reasoning_gym:{dataset}")
    for seed in range(2):
        question = (await env.reset(seed)).observation
        assert question
        best = env.best_action()
        assert best is not None
        (step,) = await play(env, seed, [f"Let me see. {env.answer(best)}"])
        assert step.reward == 1.0
        assert step.terminated
        assert step.info["success"]
        assert step.info["action"] == best
    await env.close()


async def test_the_question_is_a_matter_of_the_seed_and_the_options() -> None:
    env, other = registry.make("reasoning_gym:countdown"), registry.make("reasoning_gym:countdown")
    questions = [(await env.reset(seed)).observation for seed in range(4)]
    assert len(set(questions)) == 4
    assert [(await other.reset(seed)).observation for seed in (3, 2, 1, 0)] == questions[::-1]
    longer = registry.make("reasoning_gym:countdown", {"min_numbers": 8, "max_numbers": 8})
    assert (await longer.reset(0)).observation not in questions


async def test_a_wrong_answer_and_none_at_all(play) -> None:
    env = registry.make("reasoning_gym:basic_arithmetic", {"format_penalty": -0.3})
    (wrong,) = await play(env, 1, ["<answer>no idea</answer>"])
    assert (wrong.reward, wrong.terminated, wrong.info["success"], wrong.info["penalty"]) == (
        0,
        True,
        False,
        0,
    )
    for answer in ("no tags", "<answer> </answer>"):
        (none,) = await play(env, 1, [answer])
        assert (none.reward, none.terminated, none.info["valid"], none.info["penalty"]) == (
            0,
            True,
            False,
            -0.3,
        )
    with pytest.raises(RollwrightError, match="call reset first"):
        await env.step("<answer>again</answer>")


async def test_an_answer_that_gets_its_scorer_killed_is_worth_nothing_and_counted(play) -> None:
    env = registry.make("reasoning_gym:coin_flip", {"score_seconds": 0.3})
    (killed,) = await play(env, 1, ["<answer>1e999999999</answer>"])
    assert killed.reward == 0
    assert killed.info["metrics"] == {"scorer_killed": 1.0, "scorer_failed": 0.0, "scorer_refused": 0.0}


async def test_a_dataset_without_a_known_answer_has_no_best_action() -> None:
    env = registry.make("reasoning_gym:graph_color")
    await env.reset(1)
    assert env.best_action() is None
    assert env.actions() == ()


async def test_a_fork_keeps_its_question_open() -> None:
    env = registry.make("reasoning_gym:basic_arithmetic")
    await env.reset(1)
    assert isinstance(env, Forkable)
    fork = env.fork()
    assert (await env.step(env.answer("wrong"))).reward == 0
    best = fork.best_action()
    assert best is not None
    assert (await fork.step(fork.answer(best))).reward == 1


async def test_the_thinking_format(play) -> None:
    env = registry.make("reasoning_gym:basic_arithmetic", {"action_pattern": THINK_PATTERN})
    assert "<think>" in env.instruction
    await env.reset(1)
    best = env.best_action()
    assert best is not None
    (plain,) = await play(env, 1, [f"<answer>{best}</answer>"])
    assert not plain.info["valid"]
    (thought,) = await play(env, 1, [f"<think>sum</think> <answer>{best}</answer>"])
    assert thought.reward == 1


def test_a_wrong_name_is_told_when_the_environment_is_made() -> None:
    with pytest.raises(
        ConfigError, match="reasoning_gym:sudokku: .* did you mean 'sudoku'".replace(" did", ".did")
    ):
        registry.make("reasoning_gym:sudokku")
    assert spec("reasoning_gym:sudoku").max_steps == 1


def test_without_the_package_the_line_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"install rollwright\[reasoning\]"):
        registry.make("reasoning_gym:sudoku")
