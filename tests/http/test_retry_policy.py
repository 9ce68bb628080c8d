"""When a request is sent again, and after how long."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.http.retry import FaultCause, RetryPolicy, retry_after_seconds, status_cause

PASSING = [cause for cause in FaultCause if cause is not FaultCause.REFUSED]
DRAWS = st.floats(0, 1, exclude_max=True)


@given(st.integers(0, 8), st.integers(1, 12), st.sampled_from(PASSING), DRAWS)
def test_a_request_is_retried_as_often_as_allowed(
    retries: int, tries: int, cause: FaultCause, draw: float
) -> None:
    delay = RetryPolicy(max_retries=retries).delay(tries, cause, None, draw)
    assert (delay is None) == (tries > retries)


@given(DRAWS)
def test_a_refusal_is_final(draw: float) -> None:
    assert RetryPolicy(5).delay(1, FaultCause.REFUSED, None, draw) is None


@given(st.integers(1, 2000), DRAWS)
def test_the_back_off_doubles_up_to_its_cap_and_half_of_it_is_random(tries: int, draw: float) -> None:
    policy = RetryPolicy(max_retries=2000, first=0.5, factor=2.0, longest=60.0)
    back_off = min(60.0, 0.5 * 2.0 ** min(tries - 1, 100))
    delay = policy.delay(tries, FaultCause.TIMEOUT, None, draw)
    assert delay == pytest.approx(back_off / 2 + draw * back_off / 2)


@given(st.integers(1, 20), DRAWS, st.floats(0, 1e9))
def test_a_server_is_obeyed_up_to_the_cap(tries: int, draw: float, asked: float) -> None:
    policy = RetryPolicy(max_retries=20, longest=30.0)
    delay = policy.delay(tries, FaultCause.RATE_LIMITED, asked, draw)
    assert delay is not None
    assert min(asked, 30.0) <= delay <= min(asked, 30.0) + 15.0


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (429, FaultCause.RATE_LIMITED),
        (500, FaultCause.SERVER_ERROR),
        (503, FaultCause.SERVER_ERROR),
        (408, FaultCause.SERVER_ERROR),
        (409, FaultCause.SERVER_ERROR),
        (425, FaultCause.SERVER_ERROR),
        (400, FaultCause.REFUSED),
        (401, FaultCause.REFUSED),
        (404, FaultCause.REFUSED),
        (422, FaultCause.REFUSED),
        (307, FaultCause.REFUSED),
        (204, FaultCause.REFUSED),
    ],
)
def test_each_status_has_its_cause(status: int, cause: FaultCause) -> None:
    assert status_cause(status) is cause


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        (" 0.25 ", 0.25),
        ("Fri, 01 Mar 2030 12:00:30 GMT", 30.0),
        ("Friday, 01-Mar-30 12:00:30 GMT", 30.0),
        ("Fri Mar  1 12:00:30 2030", 30.0),
        ("Fri, 01 Mar 2030 11:00:00 GMT", 0.0),
        ("soon", None),
        ("-3", None),
        ("nan", None),
        ("1e9", None),
        ("Fri, 01 Mar 99999999999999999999 12:00:00 GMT", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(header, now=datetime(2030, 3, 1, 12, 0, 0, tzinfo=UTC)) == seconds


@given(st.text(max_size=40))
def test_no_header_is_too_strange(header: str) -> None:
    seconds = retry_after_seconds(header)
    assert seconds is None or seconds >= 0


@pytest.mark.parametrize(
    "options", [{"max_retries": -1}, {"first": -1.0}, {"first": 9.0, "longest": 1.0}, {"factor": 0.5}]
)
def test_impossible_rules_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        RetryPolicy(**{"max_retries": 5, **options})  # type: ignore[arg-type]
