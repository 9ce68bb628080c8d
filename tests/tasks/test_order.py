"""Rows are drawn in shuffled epochs that every process computes alike, and a row that is held out stays so."""

import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollwright.tasks.order import draw_of, epoch_row, is_held_out, permute

SIZES = st.integers(1, 3_000)


@given(SIZES, st.integers(0, 2**64 - 1))
def test_every_place_is_taken_once(size: int, key: int) -> None:
    assert sorted(permute(place, size, key) for place in range(size)) == list(range(size))


@given(st.integers(10**7, 10**7 + 5), st.integers(0, 2**64 - 1), st.data())
def test_places_of_ten_million_rows_are_found_without_a_table(
    size: int, key: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), unique=True, min_size=2, max_size=20))
    found = [permute(place, size, key) for place in places]
    assert all(0 <= each < size for each in found)
    assert len(set(found)) == len(found)


def test_an_epoch_has_every_row_once_and_the_next_has_another_order() -> None:
    first = [epoch_row(7, "Tag", draw, 50) for draw in range(50)]
    second = [epoch_row(7, "Tag", draw, 50) for draw in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != sorted(second)


def test_the_seed_and_the_tag_decide_the_order() -> None:
    orders = {
        tuple(epoch_row(seed, tag, draw, 30) for draw in range(30)) for seed in (1, 2) for tag in ("A", "B")
    }
    assert len(orders) == 4


def test_every_row_is_as_likely_at_every_place() -> None:
    """Chi-squared over the first place of 6,000 orders of 12 rows: 11 degrees of freedom, 0.1 % above 31.3."""
    seen = Counter(epoch_row(seed, "Tag", 0, 12) for seed in range(6_000))
    assert sum((seen[row] - 500) ** 2 / 500 for row in range(12)) < 31.3


def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    code = "from rollwright.tasks.order import epoch_row; print([epoch_row(3, 'T', d, 9) for d in range(20)])"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        ).stdout
        for seed in ("1", "2")
    }
    assert seen == {str([epoch_row(3, "T", draw, 9) for draw in range(20)]) + "\n"}


def test_a_larger_share_holds_out_the_same_rows_and_more() -> None:
    held_out = {key for key in range(2_000) if is_held_out(key, 0.2)}
    assert 320 < len(held_out) < 480
    assert held_out < {key for key in range(2_000) if is_held_out(key, 0.3)}


@given(st.lists(st.sampled_from("AB"), min_size=1, max_size=6), st.integers(0, 60))
def test_groups_of_a_tag_draw_one_row_after_the_other(slots: list[str], index: int) -> None:
    tags = [slots[each % len(slots)] for each in range(index + 1)]
    assert draw_of(index, tags[-1], slots) == tags[:-1].count(tags[-1])
