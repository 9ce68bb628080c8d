"""Training levels and held-out levels share no board, under any rotation or reflection."""

from collections.abc import Callable, Iterator

import pytest

from rollwright.envs import registry
from rollwright.envs.games.frozen_lake import FrozenLake, read_lake, shortest_path
from rollwright.envs.games.sokoban import DIFFERENT_VOCAB, STANDARD_VOCAB, Sokoban, read_level
from rollwright.envs.splits import Part, well_spaced
from rollwright.errors import ConfigError

OBLONG = {"dim_room": [5, 8]}


def lake_part(board: str) -> Part | None:
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


BY_STRUCTURE = {"split": "structure", "p": 0.75, "min_distance": 3, "max_steps": 16}


def changed_cells(one: str, other: str) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def crosses(way: list[int], board: str) -> bool:
    """Whether the cells of a path lead from the board's player to its goal without a hole."""
    lake = read_lake(board)
    return way[0] == lake.start and way[-1] == lake.goal and not lake.holes & set(way)


def way_of(board: str) -> list[int]:
    """Cells of a shortest path."""
    lake = read_lake(board)
    moves = shortest_path(lake, 4, lake.start, 16)
    assert moves is not None
    cells, steps = [lake.start], (-1, 4, 1, -4)
    for move in moves:
        cells.append(cells[-1] + steps[move])
    return cells


async def test_no_lake_to_train_on_is_near_one_held_out_by_structure_nor_has_a_path_that_crosses_it() -> None:
    """By brute force over drawn levels, whichever way they are turned, with each cell of the board compared."""
    held_out = set(await boards("FrozenLake", {**BY_STRUCTURE, "part": "held_out"}, 150))
    held_out |= set(
        await boards("FrozenLake", {**BY_STRUCTURE, "part": "held_out", "needs_detour": True}, 50)
    )
    trained = set(await boards("FrozenLake", {**BY_STRUCTURE, "part": "train"}, 200))
    nearest, crossed = 16, 0
    for board in trained:
        for view in views(board):
            way = way_of(view)
            for other in held_out:
                nearest = min(nearest, changed_cells(view, other))
                crossed += crosses(way, other)
    assert nearest >= 4
    assert crossed == 0
    plain = set(await boards("FrozenLake", {**BY_STRUCTURE, "split": "board", "part": "train"}, 200))
    other_part = set(await boards("FrozenLake", {**BY_STRUCTURE, "split": "board", "part": "held_out"}, 150))
    assert min(changed_cells(one, other) for one in plain for other in other_part) < 4, "the test can tell"


def test_any_two_well_spaced_sets_of_cells_differ_in_four_cells_and_stay_so_when_turned() -> None:
    sets = [
        cells
        for bits in range(1 << 16)
        if well_spaced(cells := frozenset(at for at in range(16) if bits >> at & 1), 4)
    ]
    assert len(sets) == 1 << 11
    found = set(sets)
    turned = {frozenset(4 * (at % 4) + 3 - at // 4 for at in cells) for cells in sets}
    mirrored = {frozenset(at - at % 4 + 3 - at % 4 for at in cells) for cells in sets}
    assert turned == found == mirrored
    # All differences of two sets are the differences to the first: the sets are a coset of a linear code.
    assert min(len(sets[0] ^ other) for other in sets[1:]) == 4
    assert min(len(sets[77] ^ other) for other in sets if other != sets[77]) == 4


async def test_lakes_that_need_a_detour_have_no_way_as_short_as_without_holes() -> None:
    for board in await boards("FrozenLake", {**BY_STRUCTURE, "part": "held_out", "needs_detour": True}, 40):
        lake = read_lake(board)
        moves = shortest_path(lake, 4, lake.start, 16)
        assert moves is not None
        assert len(moves) > lake.straight_distance(4)


async def test_a_split_by_structure_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="structure needs a size that is a power of two, got 5"):
        await boards("FrozenLake", {"size": 5, "split": "structure", "part": "train"}, 1)
    with pytest.raises(ConfigError, match="split must be one of board, structure, got 'holes'"):
        registry.make("FrozenLake", {"split": "holes"})
