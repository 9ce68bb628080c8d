from itertools import product

import pytest

from rollwright import rng
from rollwright.envs.games import sokoban_level
from rollwright.envs.games.sokoban import DIFFERENT_VOCAB, Sokoban, read_level
from rollwright.errors import ConfigError

LINE = "#######\n#P_X_O#\n#######"
TWO = "#######\n#P_XO_#\n#__XO_#\n#######"


def _answers(*actions: str) -> list[str]:
    return [f"<answer>{action}</answer>" for action in actions]


def _rewards(steps) -> list[float]:
    return [round(step.reward, 9) for step in steps]


async def test_solving_the_only_box(play) -> None:
    steps = await play(Sokoban(board=LINE), 0, _answers("Right", "Right", "Right"))
    assert _rewards(steps) == [-0.1, -0.1, 10.9]
    assert [step.observation.split("\n")[1] for step in steps] == ["#_PX_O#", "#__PXO#", "#___P√#"]
    assert [step.terminated for step in steps] == [False, False, True]
    assert [step.info["success"] for step in steps] == [False, False, True]


async def test_each_box_onto_a_target_pays_and_only_the_last_one_solves(play) -> None:
    steps = await play(Sokoban(board=TWO), 0, _answers("Right", "Right", "Left", "Down", "Right"))
    assert _rewards(steps) == [-0.1, 0.9, -0.1, -0.1, 10.9]
    assert steps[-1].observation == "#######\n#___√_#\n#__P√_#\n#######"


async def test_a_box_off_its_target_costs_what_it_gave(play) -> None:
    steps = await play(Sokoban(board="########\n#PX_O__#\n#_X_O__#\n########"), 0, _answers(*["Right"] * 3))
    assert _rewards(steps) == [-0.1, 0.9, -1.1]
    assert [step.observation.split("\n")[1] for step in steps] == ["#_PXO__#", "#__P√__#", "#___SX_#"]


@pytest.mark.parametrize(
    ("board", "action"),
    [
        (LINE, "Up"),
        ("#####\n#PX##\n#_O_#\n#####", "Right"),
        ("#######\n#PXX__#\n#OO___#\n#######", "Right"),
    ],
)
async def test_walls_and_rows_of_boxes_do_not_yield(play, board: str, action: str) -> None:
    (step,) = await play(Sokoban(board=board), 0, _answers(action))
    assert step.observation == board
    assert step.reward == -0.1
    assert step.info["valid"]
    assert step.info["penalty"] == 0
    assert step.info["metrics"] == {"effective": 0.0}


@pytest.mark.parametrize("answer", ["", "Right", "<answer>Push</answer>", "<answer></answer>"])
async def test_a_malformed_answer_costs_an_action_and_a_penalty_apart_from_it(play, answer: str) -> None:
    (step,) = await play(Sokoban(board=LINE), 0, [answer])
    assert step.observation == LINE
    assert step.reward == -0.1
    assert step.info["penalty"] == -0.15
    assert not step.info["valid"]


async def test_the_action_limit(play) -> None:
    steps = await play(Sokoban(board=LINE), 0, ["nonsense"] * 20)
    assert len(steps) == 10
    assert [step.truncated for step in steps] == [False] * 9 + [True]


async def test_another_vocabulary_shows_the_same_rooms() -> None:
    standard, different = Sokoban(), Sokoban(grid_vocab=DIFFERENT_VOCAB)
    to_different = str.maketrans("#_O√XPS", "W.GCBA@")
    for seed in range(50):
        plain = (await standard.reset(seed)).observation
        assert (await different.reset(seed)).observation == plain.translate(to_different)
    for symbol in DIFFERENT_VOCAB.values():
        assert f"{symbol} = " in different.instruction


async def test_a_part_of_the_vocabulary_can_be_replaced() -> None:
    env = Sokoban(grid_vocab={"box": "B"})
    shown = (await env.reset(0)).observation
    assert "B" in shown
    assert "X" not in shown
    assert "P" in shown


def test_the_solver_finds_the_shortest_solution_or_none() -> None:
    """Compared with an exhaustive search over action sequences."""
    for seed in range(40):
        level = sokoban_level.draw(rng.generator("test", seed), 5, 5, 1, 6)
        found = sokoban_level.solve(level.room, level.start, 6)
        shortest = next(
            length
            for length in range(1, 7)
            if any(_solves(level, moves) for moves in product(range(4), repeat=length))
        )
        assert found is not None
        assert _solves(level, found)
        assert len(found) == shortest
        assert sokoban_level.solve(level.room, level.start, shortest - 1) is None


def _solves(level: sokoban_level.Level, moves) -> bool:
    player, boxes = level.start
    for move in moves:
        step = level.room.steps[move]
        to = player + step
        if to in boxes and level.room.is_open[to + step] and to + step not in boxes:
            boxes = sokoban_level.pushed(boxes, to, to + step)
        if level.room.is_open[to] and to not in boxes:
            player = to
    return boxes == level.room.targets


async def test_the_oracle_sees_a_lost_game() -> None:
    env = Sokoban(board="#####\n#___#\n#PX_#\n#_O_#\n#####")
    await env.reset(0)
    assert env.best_action() == "Up"
    await env.step("<answer>Right</answer>")  # at the wall the box can never return to the target
    assert env.best_action() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim_room": (3, 6)}, r"dim_room must be 4 or more each way, got \[3, 6\]"),
        ({"num_boxes": 0}, "num_boxes must be 1 or more"),
        ({"search_depth": 0}, "search_depth must be 1 or more"),
        ({"grid_vocab": {"wal": "W"}}, "did you mean 'wall'"),
        ({"grid_vocab": {"wall": "WW"}}, "one visible character"),
        ({"grid_vocab": {"wall": "P"}}, "each symbol must be different"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sokoban(**options)


async def test_a_room_too_small_for_its_boxes_is_refused() -> None:
    with pytest.raises(ConfigError, match="use a larger room, fewer boxes"):
        await Sokoban(dim_room=(4, 4), num_boxes=3).reset(0)


@pytest.mark.parametrize(
    ("board", "words"),
    [
        ("####\n#PX#\n###", "same length"),
        ("#####\n#PXO?\n#####", "unknown symbol"),
        ("#####\n#PXO_\n#####", "border must be wall"),
        ("#####\n#_XO#\n#####", "got 0 players, 1 boxes, 1 targets"),
        ("#####\n#PXX#\n#####", "got 1 players, 2 boxes, 0 targets"),
        ("#####\n#P√_#\n#####", "a box that is not on a target"),
    ],
)
def test_a_drawing_that_is_no_level_is_refused(board: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_level(board)
