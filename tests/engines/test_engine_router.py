"""Routing between engine addresses: sticky, balanced, away from what fails; and bounded."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.pool import FAILURES_IN_A_ROW, Router
from rollwright.errors import ConfigError
from rollwright.http.retry import FaultCause


def test_an_episode_stays_with_its_address_whatever_the_load() -> None:
    router = Router(3)
    home = router.pick("episode")
    assert home is not None
    for _ in range(50):
        router.begin(home)
        assert router.pick("episode") == home


def test_a_new_episode_goes_where_the_least_is_under_way() -> None:
    router = Router(3)
    for place, load in ((0, 5), (1, 2), (2, 4)):
        for _ in range(load):
            router.begin(place)
    assert router.pick("new") == 1
    router.end(2)
    router.end(2)
    router.end(2)
    assert router.pick("newer") == 2


def test_episodes_that_come_at_once_are_spread_evenly() -> None:
    router = Router(4)
    assert set(Counter(router.pick(f"e{number}") for number in range(100)).values()) == {25}


def test_an_address_that_cannot_be_reached_goes_out_at_once_and_its_episodes_move() -> None:
    router = Router(2)
    homes = {f"e{number}": router.pick(f"e{number}") for number in range(10)}
    assert router.note_failure(0, FaultCause.CONNECTION)
    assert not router.note_failure(0, FaultCause.CONNECTION)  # out already
    assert {router.pick(episode) for episode in homes} == {1}
    assert router.moved == sum(home == 0 for home in homes.values())
    router.bring_back(0)
    assert {router.pick(episode) for episode in homes} == {1}  # where their prefixes are now
    assert router.pick("new") == 0


@pytest.mark.parametrize("cause", [FaultCause.TIMEOUT, FaultCause.SERVER_ERROR, FaultCause.BROKEN_BODY])
def test_other_failures_take_it_out_only_in_a_row(cause: FaultCause) -> None:
    router = Router(1)
    for _ in range(5):
        for _ in range(FAILURES_IN_A_ROW - 1):
            assert not router.note_failure(0, cause)
        router.note_success(0)
    assert [router.note_failure(0, cause) for _ in range(FAILURES_IN_A_ROW)] == [False] * (
        FAILURES_IN_A_ROW - 1
    ) + [True]
    assert router.pick("e") is None


@pytest.mark.parametrize("cause", [FaultCause.RATE_LIMITED, FaultCause.REFUSED])
def test_load_and_bad_requests_are_no_fault_of_the_engine(cause: FaultCause) -> None:
    router = Router(1)
    assert not any(router.note_failure(0, cause) for _ in range(20))


def test_no_address_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="base_urls: none given"):
        Router(0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["call", "fail", "back"]), st.integers(0, 9), st.integers(0, 2)), max_size=80
)


@given(STEPS)
def test_what_is_picked_is_in_service_and_an_episode_moves_only_when_it_must(
    steps: list[tuple[str, int, int]],
) -> None:
    router = Router(3, remembered=6)
    homes: dict[str, int] = {}
    recent: list[str] = []
    for what, number, place in steps:
        if what == "fail":
            router.note_failure(place, FaultCause.CONNECTION)
        elif what == "back":
            router.bring_back(place)
        else:
            episode = f"e{number}"
            chosen = router.pick(episode)
            assert (chosen is None) == (not router.serving)
            if chosen is None:
                continue
            assert chosen in router.serving
            remembered = episode in recent[-6:]
            if remembered and homes.get(episode) in router.serving:
                assert chosen == homes[episode]
            homes[episode] = chosen
            recent = [each for each in recent if each != episode] + [episode]
