"""Training levels and held-out levels share no board, under any rotation or reflection."""

from collections.abc import Callable, Iterator

import pytest

from rollwright.envs import registry
from rollwright.envs.games.frozen_lake import FrozenLake, read_lake
from rollwright.envs.games.sokoban import DIFFERENT_VOCAB, STANDARD_VOCAB, Sokoban, read_level
from rollwright.envs.splits import Part
from rollwright.errors import ConfigError

OBLONG = {"dim_room": [5, 8]}


def lake_part(board: str) -> Part:
    return read_lake(board).part(len(board.split()))


def room_part(board: str) -> Part:
    return read_level(board, DIFFERENT_VOCAB if "W" in board else STANDARD_VOCAB).room.part()


CASES = [
    ("FrozenLake", {}, lake_part),
    ("FrozenLake", {"size": 6}, lake_part),
    ("SimpleSokoban", {}, room_part),
    ("SimpleSokoban", OBLONG, room_part),
    ("LargerSokoban", {}, room_part),
    ("SokobanDifferentGridVocab", {}, room_part),
]
every_game = pytest.mark.parametrize(
    ("tag", "options", "part_of"), CASES, ids=[f"{tag} {options or ''}".rstrip() for tag, options, _ in CASES]
)


async def boards(tag: str, options: dict[str, object], count: int) -> list[str]:
    env = registry.make(tag, options)
    return [(await env.reset(seed)).observation for seed in range(count)]


def views(board: str) -> Iterator[str]:
    rows = board.split()
    for _ in range(4):
        rows = ["".join(column) for column in zip(*reversed(rows), strict=True)]
        yield "\n".join(rows)
        yield "\n".join(row[::-1] for row in rows)


@every_game
async def test_a_board_is_in_one_part_whichever_way_it_is_turned_or_mirrored(
    tag: str, options: dict[str, object], part_of: Callable[[str], Part]
) -> None:
    found = set()
    for board in await boards(tag, options, 60):
        (part,) = {part_of(view) for view in views(board)}
        found.add(part)
    assert found == {Part.TRAIN, Part.HELD_OUT}


@every_game
async def test_only_levels_of_the_part_asked_for_are_drawn(
    tag: str, options: dict[str, object], part_of: Callable[[str], Part]
) -> None:
    for part in (Part.TRAIN, Part.HELD_OUT):
        assert {part_of(board) for board in await boards(tag, {**options, "part": part}, 60)} == {part}


@every_game
async def test_one_level_in_ten_is_held_out(
    tag: str, options: dict[str, object], part_of: Callable[[str], Part]
) -> None:
    parts = [part_of(board) for board in await boards(tag, options, 400)]
    assert 20 < parts.count(Part.HELD_OUT) < 70


@pytest.mark.parametrize("tag", ["FrozenLake", "SimpleSokoban"])
async def test_no_board_of_one_part_is_a_view_of_one_of_the_other(tag: str) -> None:
    """Checked on the rendered boards without player and boxes; boards are small enough that their symmetric views recur."""
    held_out = {still(board) for board in await boards(tag, {"part": "held_out"}, 150)}
    trained = {view for board in await boards(tag, {"part": "train"}, 600) for view in views(still(board))}
    anywhere = {view for board in await boards(tag, {}, 600) for view in views(still(board))}
    assert not held_out & trained
    assert held_out & anywhere


def still(board: str) -> str:
    """Without player and box."""
    return board.translate(str.maketrans("PXS", "__O"))


@pytest.mark.parametrize(
    ("board", "elsewhere", "part_of"),
    [
        ("P_O_\n__O_\n____\n__OG", "__O_\nP_O_\n____\n__OG", lake_part),
        ("######\n#P___#\n#_X_O#\n######", "######\n#__X_#\n#___S#\n######", room_part),
    ],
)
def test_where_a_game_begins_does_not_matter(
    board: str, elsewhere: str, part_of: Callable[[str], Part]
) -> None:
    assert part_of(board) is part_of(elsewhere)


async def test_the_parts_are_those_that_the_base_models_were_made_with() -> None:
    """Otherwise a model trained on recorded play would have seen its validation levels."""
    held_out = {
        tag: [seed for seed, board in enumerate(await boards(tag, {}, 60)) if part_of(board) is Part.HELD_OUT]
        for tag, part_of in (("FrozenLake", lake_part), ("SimpleSokoban", room_part))
    }
    assert held_out == {
        "FrozenLake": [6, 16, 24, 31],
        "SimpleSokoban": [11, 15, 17, 24, 32, 36, 41, 47, 52],
    }


@pytest.mark.parametrize("game", [FrozenLake, Sokoban])
def test_a_part_that_does_not_exist_is_refused(game: type[FrozenLake | Sokoban]) -> None:
    with pytest.raises(ConfigError, match="part must be one of all, train, held_out, got 'heldout'"):
        game(part="heldout")


async def test_a_part_that_has_no_room_of_this_size_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="part=held_out"):
        await Sokoban(dim_room=(4, 4), part="held_out").reset(0)
