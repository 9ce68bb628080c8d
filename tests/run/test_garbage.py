"""Looking for cycles costs no more where many episodes come and go, and cycles are still found."""

import gc
from typing import Any

from rollwright.run.garbage import THRESHOLDS, rare_collections

LIVE = 8 * THRESHOLDS[0]


def test_objects_that_come_and_go_are_not_looked_over_again_and_again() -> None:
    looks: list[int] = []

    def count(phase: str, look: dict[str, Any]) -> None:
        if phase == "stop":
            looks.append(look["generation"])

    with rare_collections():
        live: list[list[int]] = [[] for _ in range(LIVE)]
        for place in range(LIVE):
            live[place] = []  # as many as before, and all of them new
        gc.callbacks.append(count)
        try:
            for _ in range(10):
                more: list[list[int]] = [[] for _ in range(THRESHOLDS[0] + 1000)]
                del more
        finally:
            gc.callbacks.remove(count)
    assert len(looks) <= 2


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_found_all_the_same_and_the_thresholds_come_back() -> None:
    before, alive = gc.get_threshold(), _knots()
    with rare_collections():
        for _ in range(3 * THRESHOLDS[0]):
            Knot()
        assert _knots() - alive < 2 * THRESHOLDS[0]
    assert gc.get_threshold() == before
    assert all(each.__name__ != "_set_next" for each in gc.callbacks if hasattr(each, "__name__"))


def _knots() -> int:
    return sum(isinstance(each, Knot) for each in gc.get_objects())
