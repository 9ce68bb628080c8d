"""A draw depends on its key alone, in any process."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from rollwright import rng

keys = st.lists(st.integers() | st.text(), min_size=1).map(tuple)


@given(keys)
def test_draws_are_in_their_ranges_whatever_the_key(key: tuple[str | int, ...]) -> None:
    assert 0 <= rng.uniform(*key) < 1
    assert 0 <= rng.seed(*key) < 2**31


def test_a_key_gives_the_draws_that_it_has_always_given() -> None:
    """The levels of all recorded runs depend on these values."""
    key = (42, "level", "train", 7)
    assert rng.digest(*key) == 12817788510721112234
    assert rng.uniform(*key) == 0.6948537074891784
    assert rng.seed(*key) == 731740330
    assert rng.generator(*key).random() == 0.9031142670962715


def test_parts_are_told_apart_by_type_and_by_place() -> None:
    assert (
        len(
            {
                rng.digest(1, 2),
                rng.digest(2, 1),
                rng.digest("1", 2),
                rng.digest(12),
                rng.digest("1", "2"),
            }
        )
        == 5
    )


def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    code = "from rollwright import rng; print(rng.digest(42, 'level', 'train', 7))"
    command = [sys.executable, "-c", code]
    answers = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert answers == {f"{rng.digest(42, 'level', 'train', 7)}\n"}


def test_draws_are_spread_evenly() -> None:
    numbers = [rng.uniform("even", place) for place in range(4000)]
    tenths = [sum(1 for each in numbers if place <= 10 * each < place + 1) for place in range(10)]
    assert all(300 < count < 500 for count in tenths)
