"""Waiting dequeues when the store closes."""

from collections.abc import Sequence

from rollwright.store.records import AttemptedRollout
from rollwright.store.sql.claims import Ask
from rollwright.store.sql.waiters import Claimants


async def test_who_begins_to_wait_while_the_store_closes_goes_away_with_nothing_and_asks_nothing() -> None:
    asked: list[Sequence[Ask]] = []

    async def claim(asks: Sequence[Ask]) -> list[list[AttemptedRollout]]:
        asked.append(asks)
        raise AssertionError("the store is closed")

    claimants = Claimants(claim, lambda unwanted: None)
    claimants.wake()  # something came
    claimants.close()
    assert await claimants.wait((1, "worker-0", None), timeout=60) == []
    claimants.wake()
    assert not asked
