"""A board that was drawn for several levels counts once, in the share and in the interval."""

from rollwright.observe.solved_boards import solved_boards
from rollwright.trajectory import Trajectory


def episode(seed: int, board: str, success: bool | None, tag: str = "Lake") -> Trajectory:
    return Trajectory(
        rollout_id=f"r{seed}",
        attempt_id="a",
        group_id=f"g{seed}",
        tag=tag,
        seed=seed,
        observation=board,
        success=success,
    )


def test_levels_with_the_same_board_count_once() -> None:
    before = [episode(seed, "one" if seed < 9 else "two", False) for seed in range(10)]
    after = [episode(seed, "one" if seed < 9 else "two", seed < 9) for seed in range(10)]
    (found,) = solved_boards(before, after)
    assert (found.tag, found.levels, found.boards) == ("Lake", 10, 2)
    assert (found.before, found.after) == (0.0, 0.5)
    distinct = [episode(seed, str(seed), seed < 5) for seed in range(10)]
    (many,) = solved_boards(distinct, distinct)
    assert many.boards == 10
    assert found.interval is not None
    assert many.interval is not None
    assert found.interval.half_width > many.interval.half_width, "two boards tell less than ten"


def test_tags_stay_apart_and_levels_of_one_validation_only_are_left_out() -> None:
    before = [episode(1, "a", False), episode(2, "b", None), episode(3, "c", True, "Room")]
    after = [
        episode(1, "a", True),
        episode(2, "b", True),
        episode(3, "c", True, "Room"),
        episode(4, "d", True),
    ]
    assert [(each.tag, each.levels, each.interval) for each in solved_boards(before, after)] == [
        ("Lake", 1, None),
        ("Room", 1, None),
    ]
    assert solved_boards([], []) == []
