"""The system's clock jumps while leases run: none ends early, none lasts longer, nothing is stuck."""

import time

import pytest

from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused
from rollwright.store.invariants import complaints
from rollwright.store.records import AttemptStatus, RolloutConfig

SHORT, LONG = 0.5, 600.0
"""Leases in seconds: one that ends while the test looks on, one that does not."""
HOUR = 3600.0


@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forward", "back"])
async def test_a_jump_of_the_system_clock_does_not_reach_the_leases(
    ticking: Store, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    for name, lease in (("ro-long", LONG), ("ro-short", SHORT)):
        rules = RolloutConfig(unresponsive_seconds=lease)
        await ticking.enqueue_rollout(None, rollout_id=name, config=rules)
    long, short = await ticking.dequeue_many_rollouts(2, "worker-0")
    wall, wall_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(jump * 1e9))

    taken_over = await ticking.dequeue_rollout("worker-1", timeout=LONG)
    assert taken_over is not None
    assert taken_over.rollout_id == "ro-short", "a silent worker loses its rollout after its lease, as always"
    with pytest.raises(AttemptRefused):
        await ticking.update_attempt("ro-short", short.attempt.attempt_id, status="succeeded")
    [first, *_] = await ticking.query_attempts("ro-short")
    assert first.status is AttemptStatus.UNRESPONSIVE

    pair = ("ro-long", long.attempt.attempt_id)
    assert await ticking.update_worker("worker-0", attempts=[pair]) == [], "the jump took nothing away"
    await ticking.update_attempt(*pair, status="succeeded")
    assert complaints(await ticking.read_events(), await ticking.read_completions()) == []
