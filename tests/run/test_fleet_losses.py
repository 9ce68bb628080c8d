"""When a fleet gives up on workers that are lost without a word."""

from collections.abc import Collection

import pytest

from rollwright.errors import RollwrightError
from rollwright.rollout import Activity
from rollwright.run.fleet import MOST_LOSSES, Fleet, ScaleRules
from rollwright.store.memory import MemoryStore


class NoFleet(Fleet):
    """Has no workers; only what it is told of them counts."""

    kind = "far"

    def __init__(self) -> None:
        self.activity = Activity()
        super().__init__(MemoryStore(), ScaleRules(1, maximum=4), self.activity)

    def lose(self, *, short: bool, new_round: bool) -> None:
        self._count_loss("the node died", short=short, new_round=new_round)

    def _alive(self) -> Collection[str]:
        return ()

    async def _start(self, name: str, now: float) -> None: ...

    async def _stop(self, name: str) -> None: ...

    async def _reap(self, now: float) -> None: ...


@pytest.fixture
def fleet() -> NoFleet:
    return NoFleet()


def test_workers_that_are_lost_at_every_start_are_given_up_with_one_line(fleet: NoFleet) -> None:
    for _ in range(MOST_LOSSES - 1):
        fleet.lose(short=True, new_round=True)
    with pytest.raises(RollwrightError, match=f"far workers .* {MOST_LOSSES} times .*: the node died$"):
        fleet.lose(short=True, new_round=True)
    assert fleet.activity.dead_workers == MOST_LOSSES


def test_workers_that_are_lost_together_count_once(fleet: NoFleet) -> None:
    rounds = MOST_LOSSES - 1
    for _ in range(rounds):
        for number in range(MOST_LOSSES):
            fleet.lose(short=True, new_round=number == 0)
    assert fleet.activity.dead_workers == rounds * MOST_LOSSES
    with pytest.raises(RollwrightError):
        fleet.lose(short=True, new_round=True)


def test_a_worker_that_lived_shows_that_others_can(fleet: NoFleet) -> None:
    for number in range(4 * MOST_LOSSES):
        fleet.lose(short=bool(number % (MOST_LOSSES - 1)), new_round=True)
    assert fleet.activity.dead_workers == 4 * MOST_LOSSES
