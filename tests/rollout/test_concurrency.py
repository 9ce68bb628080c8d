"""The capacity finder settles near the engine's capacity, from throughput alone."""

from dataclasses import replace

import pytest

from rollwright.rng import generator
from rollwright.rollout.concurrency import MOST_PATIENCE, PATIENCE, START, ConcurrencyController, LoadWindow


def served(limit: int, slots: int) -> LoadWindow:
    """A window against an engine whose throughput grows up to `slots` calls at once."""
    return LoadWindow(seconds=1.0, turns=4 * limit, tokens=100 * min(limit, slots), inflight=limit)


@pytest.mark.parametrize("slots", [2, 8, 40, 64, 70, 200, 1000])
def test_it_finds_the_knee_and_stays_there(slots: int) -> None:
    finder = ConcurrencyController(maximum=4096)
    for _ in range(100):
        finder.observe(served(finder.limit, slots))
    seen = [finder.observe(served(finder.limit, slots)) for _ in range(6 * PATIENCE)]
    usual = sorted(seen)[len(seen) // 2]
    assert slots * 0.9 <= usual <= slots * 1.6


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_make_it_drift_away(seed: int) -> None:
    luck = generator("capacity noise", seed)
    finder = ConcurrencyController(maximum=4096)
    seen = []
    for _ in range(600):
        window = served(finder.limit, 64)
        seen.append(finder.observe(replace(window, tokens=int(window.tokens * luck.lognormvariate(0, 0.08)))))
    late = sorted(seen[100:])
    assert 40 <= late[len(late) // 2] <= 200


def test_it_grows_when_the_engine_grows() -> None:
    finder = ConcurrencyController(maximum=4096)
    for slots, least in ((64, 64), (512, 400)):
        seen = [finder.observe(served(finder.limit, slots)) for _ in range(80 + 2 * MOST_PATIENCE)]
        assert sorted(seen[-40:])[20] >= least


def test_trials_that_change_nothing_become_rare() -> None:
    finder = ConcurrencyController(maximum=4096)
    seen = [finder.observe(served(finder.limit, 64)) for _ in range(1000)]
    usual = sorted(seen)[len(seen) // 2]
    assert usual == 64
    below = [limit for limit in seen[100:] if limit < usual]
    assert 0 < len(below) <= 1000 // (2 * MOST_PATIENCE) + 1


def test_it_backs_off_at_once_when_the_engine_refuses_load_and_never_to_nothing() -> None:
    finder = ConcurrencyController(maximum=100, start=64)
    assert finder.observe(LoadWindow(1.0, 10, 100, inflight=64, pressure=3)) == 44
    for _ in range(50):
        finder.observe(LoadWindow(1.0, 1, 1, inflight=1, pressure=1))
    assert finder.limit == 1
    for _ in range(PATIENCE + 1):
        finder.observe(served(finder.limit, 64))
    assert finder.limit > 1


def test_it_learns_nothing_while_something_else_holds_episodes_back() -> None:
    finder = ConcurrencyController(maximum=1000)
    for _ in range(20):
        assert finder.observe(LoadWindow(1.0, 1000, 10_000, inflight=5)) == START


def test_it_never_exceeds_the_number_of_environments() -> None:
    finder = ConcurrencyController(maximum=50)
    for _ in range(40):
        assert finder.observe(served(finder.limit, 10_000)) <= 50
    assert finder.limit == 50
