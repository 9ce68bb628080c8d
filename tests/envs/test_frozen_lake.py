import pytest

from rollwright.envs.games.frozen_lake import FrozenLake
from rollwright.envs.parsing import THINK_PATTERN
from rollwright.errors import ConfigError, RollwrightError

BOARD = "P_O\n_O_\n__G"


def _answers(*actions: str) -> list[str]:
    return [f"<answer>{action}</answer>" for action in actions]


async def test_reaching_the_goal_gives_one_and_ends_the_game(play) -> None:
    steps = await play(FrozenLake(board=BOARD), 0, _answers("Down", "Down", "Right", "Right"))
    assert [step.reward for step in steps] == [0, 0, 0, 1]
    assert [step.observation for step in steps] == [
        "__O\nPO_\n__G",
        "__O\n_O_\nP_G",
        "__O\n_O_\n_PG",
        "__O\n_O_\n__√",
    ]
    assert steps[-1].terminated
    assert not steps[-1].truncated
    assert [step.info["success"] for step in steps] == [False, False, False, True]


async def test_a_hole_ends_the_game_with_nothing(play) -> None:
    (*_, last) = await play(FrozenLake(board=BOARD), 0, _answers("Right", "Right", "Right"))
    assert last.observation == "__X\n_O_\n__G"
    assert (last.reward, last.terminated, last.info["success"]) == (0, True, False)


async def test_the_edge_holds(play) -> None:
    for action in ("Left", "Up"):
        (step,) = await play(FrozenLake(board=BOARD), 0, _answers(action))
        assert step.observation == BOARD
        assert step.info["metrics"] == {"effective": 0.0}
        assert step.info["valid"]


@pytest.mark.parametrize(
    "answer", ["", "Down", "<answer>Jump</answer>", "<answer>Down", "<answer>Down.</answer>"]
)
async def test_a_malformed_answer_moves_nothing_and_costs_a_penalty_apart_from_the_reward(
    play, answer: str
) -> None:
    (step,) = await play(FrozenLake(board=BOARD), 0, [answer])
    assert step.observation == BOARD
    assert step.reward == 0
    assert step.info["penalty"] == -0.01
    assert step.info["action"] is None
    assert not step.info["valid"]


async def test_case_and_space_do_not_matter_in_an_action(play) -> None:
    (step,) = await play(FrozenLake(board=BOARD), 0, ["<answer>  dOWN </answer>"])
    assert step.info["action"] == "Down"
    assert step.info["penalty"] == 0


async def test_every_answer_counts_and_the_game_truncates_itself(play) -> None:
    steps = await play(FrozenLake(board=BOARD, max_steps=3), 0, ["nonsense", *_answers("Up", "Down", "Down")])
    assert [step.truncated for step in steps] == [False, False, True]
    assert not steps[-1].terminated


async def test_the_goal_with_the_last_action_is_an_end_and_no_truncation(play) -> None:
    steps = await play(FrozenLake(board=BOARD, max_steps=4), 0, _answers("Down", "Down", "Right", "Right"))
    assert (steps[-1].terminated, steps[-1].truncated) == (True, False)


async def test_a_step_outside_an_episode_is_refused(play) -> None:
    env = FrozenLake(board=BOARD)
    with pytest.raises(RollwrightError, match="call reset first"):
        await env.step("<answer>Up</answer>")
    await play(env, 0, _answers("Right", "Right"))
    with pytest.raises(RollwrightError, match="call reset first"):
        await env.step("<answer>Up</answer>")
    assert env.best_action() is None


async def test_the_oracle_knows_when_it_is_too_late() -> None:
    env = FrozenLake(board=BOARD, max_steps=4)
    await env.reset(0)
    assert env.best_action() == "Down"
    await env.step("nonsense")
    assert env.best_action() is None


async def test_slippery_ice_goes_astray_two_times_in_three_and_never_backwards(play) -> None:
    board = "\n".join(["_" * 9] * 4 + ["____P____"] + ["_" * 9] * 3 + ["G________"])
    seen = {"ahead": 0, "aside": 0}
    for seed in range(600):
        (step,) = await play(FrozenLake(board=board, is_slippery=True), seed, _answers("Up"))
        rows = step.observation.split("\n")
        assert "P" not in rows[5]
        seen["ahead" if "P" in rows[3] else "aside"] += 1
    assert 150 < seen["ahead"] < 250


async def test_slips_are_a_matter_of_the_seed_and_the_number_of_the_action_alone(play) -> None:
    answers = _answers("Down", "Right", "Up", "Left") * 2
    env = FrozenLake(is_slippery=True, p=1.0)
    first = await play(env, 7, answers)
    await play(env, 8, answers)
    assert await play(env, 7, answers) == first


async def test_the_oracle_foresees_the_slips() -> None:
    for seed in range(100):
        env = FrozenLake(is_slippery=True)
        await env.reset(seed)
        done = False
        while not done:
            action = env.best_action()
            assert action is not None
            step = await env.step(env.answer(action))
            done = step.terminated or step.truncated
        assert step.info["success"]


def test_the_instruction_is_true_to_the_options() -> None:
    assert "not slippery" in FrozenLake().instruction
    assert "not slippery" not in FrozenLake(is_slippery=True).instruction
    assert "slippery" in FrozenLake(is_slippery=True).instruction
    assert "<think>" in FrozenLake(action_pattern=THINK_PATTERN).instruction
    for text in (
        "Left, Down, Right, Up",
        "P = ",
        "_ = ",
        "O = ",
        "G = ",
        "X = ",
        "√ = ",
        "<answer>Left</answer>",
    ):
        assert text in FrozenLake().instruction


async def test_min_distance_keeps_goals_away() -> None:
    env = FrozenLake(min_distance=4)
    for seed in range(50):
        await env.reset(seed)
        count = 0
        while (action := env.best_action()) is not None:
            await env.step(env.answer(action))
            count += 1
        assert count >= 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 1}, "size must be 2 or more, got 1"),
        ({"p": 0.0}, "p must be above 0"),
        ({"p": 1.5}, "p must be above 0 and at most 1"),
        ({"min_distance": 0}, "min_distance must be from 1"),
        ({"min_distance": 11}, r"max_steps \(10\)"),
        ({"max_steps": 0}, "max_steps must be 1 or more"),
        ({"format_penalty": 0.5}, "zero or negative"),
        ({"board": "P_\n_"}, "as many columns as rows"),
        ({"board": "P_\n_?"}, r"unknown symbol '\?'"),
        ({"board": "PP\n_G"}, "one player"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FrozenLake(**options)


async def test_options_that_no_level_can_meet_are_refused() -> None:
    with pytest.raises(ConfigError, match="lower min_distance"):
        await FrozenLake(size=2, min_distance=5).reset(0)
