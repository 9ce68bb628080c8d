"""The rules of the store, as plain functions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.store.errors import ImpossibleChange
from rollwright.store.records import AttemptStatus, RolloutConfig, RolloutStatus, WorkerStatus
from rollwright.store.transitions import (
    ATTEMPT_CHANGES,
    FINAL_ATTEMPT,
    FINAL_ROLLOUT,
    HELD,
    ROLLOUT_CHANGES,
    WAITING,
    check_attempt_change,
    check_caller_change,
    check_rollout_change,
    is_news,
    lapsed,
    lapsed_as,
    lease_end,
    rollout_after,
    unchanged,
    worker_status,
)

seconds = st.floats(min_value=0.001, max_value=1e6)
times = st.floats(min_value=0, max_value=1e9)
configs = st.builds(
    RolloutConfig,
    timeout_seconds=st.none() | seconds,
    unresponsive_seconds=st.none() | seconds,
    max_attempts=st.integers(1, 5),
    retry_condition=st.lists(st.sampled_from(AttemptStatus), unique=True).map(tuple),
)


def test_every_status_waits_is_held_or_is_final() -> None:
    assert set(RolloutStatus) == WAITING | HELD | FINAL_ROLLOUT
    assert not WAITING & HELD
    assert not (WAITING | HELD) & FINAL_ROLLOUT
    assert {RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.CANCELLED} == FINAL_ROLLOUT
    assert set(AttemptStatus) - FINAL_ATTEMPT == {AttemptStatus.PREPARING, AttemptStatus.RUNNING}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(sorted(FINAL_ROLLOUT), RolloutStatus)))
def test_a_final_rollout_never_changes(old: RolloutStatus, new: RolloutStatus) -> None:
    with pytest.raises(ImpossibleChange, match="final"):
        check_rollout_change("ro-1", old, new)
    with pytest.raises(ImpossibleChange, match="final"):
        check_caller_change("ro-1", old, new)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(sorted(FINAL_ATTEMPT), AttemptStatus)))
def test_a_final_attempt_is_never_revived(old: AttemptStatus, new: AttemptStatus) -> None:
    with pytest.raises(ImpossibleChange, match="final"):
        check_attempt_change("at-1", old, new)


def test_nothing_goes_back_to_where_it_began() -> None:
    assert not any(RolloutStatus.QUEUING in after for after in ROLLOUT_CHANGES.values())
    assert not any(AttemptStatus.PREPARING in after for after in ATTEMPT_CHANGES.values())


@pytest.mark.parametrize("old", sorted(set(RolloutStatus) - FINAL_ROLLOUT))
def test_success_belongs_to_the_attempt_that_holds_the_rollout(old: RolloutStatus) -> None:
    with pytest.raises(ImpossibleChange):
        check_caller_change("ro-1", old, RolloutStatus.SUCCEEDED)
    if old in WAITING:
        with pytest.raises(ImpossibleChange):
            check_rollout_change("ro-1", old, RolloutStatus.SUCCEEDED)


def test_waiting_once_more_is_waiting() -> None:
    assert unchanged(RolloutStatus.QUEUING, RolloutStatus.REQUEUING)
    assert not unchanged(RolloutStatus.RUNNING, RolloutStatus.REQUEUING)


@given(configs, st.sampled_from(sorted(FINAL_ATTEMPT)), st.integers(0, 6))
def test_what_follows_an_attempt_is_a_possible_change(
    config: RolloutConfig, ended: AttemptStatus, tries: int
) -> None:
    after = rollout_after(ended, config, tries)
    check_rollout_change("ro-1", RolloutStatus.RUNNING, after)
    assert (after is RolloutStatus.SUCCEEDED) == (ended is AttemptStatus.SUCCEEDED)
    if ended is AttemptStatus.CANCELLED:
        assert after is RolloutStatus.REQUEUING


@given(configs, st.sampled_from([AttemptStatus.FAILED, AttemptStatus.TIMEOUT, AttemptStatus.UNRESPONSIVE]))
def test_a_rollout_is_tried_max_attempts_times_and_no_more(
    config: RolloutConfig, ended: AttemptStatus
) -> None:
    tries = 1
    while rollout_after(ended, config, tries) is RolloutStatus.REQUEUING:
        tries += 1
    assert tries == (config.max_attempts if ended in config.retry_condition else 1)


@given(configs, times, seconds)
def test_a_lease_ends_at_the_earlier_limit(config: RolloutConfig, start: float, later: float) -> None:
    heartbeat = start + later
    end = lease_end(config, start, heartbeat)
    limits = [
        None if config.timeout_seconds is None else start + config.timeout_seconds,
        None if config.unresponsive_seconds is None else heartbeat + config.unresponsive_seconds,
    ]
    assert end == min((limit for limit in limits if limit is not None), default=None)
    assert not lapsed(None, start)
    if end is not None:
        assert lapsed(end, end)
        status, reason = lapsed_as(config, start, end)
        assert status is (AttemptStatus.TIMEOUT if end == limits[0] else AttemptStatus.UNRESPONSIVE)
        assert "_seconds" in reason


def test_a_worker_is_known_by_its_last_sign_of_life() -> None:
    assert worker_status(0, 100.0, 130.0) is WorkerStatus.IDLE
    assert worker_status(2, 100.0, 130.0) is WorkerStatus.BUSY
    assert worker_status(2, 100.0, 160.0) is WorkerStatus.UNKNOWN
    assert worker_status(0, None, 0.0) is WorkerStatus.UNKNOWN


def test_a_heartbeat_is_written_down_unless_one_was_a_moment_ago() -> None:
    patient = RolloutConfig(unresponsive_seconds=100.0)
    assert not is_news(patient, 50.0, 50.0)
    assert not is_news(patient, 50.0, 50.9)
    assert is_news(patient, 50.0, 51.0)
    assert is_news(RolloutConfig(unresponsive_seconds=None), 50.0, 50.0)
