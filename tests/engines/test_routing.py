"""Routing between engine addresses: sticky, balanced, away from what fails; and bounded."""

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.pool import FAILURES_IN_A_ROW, Router
from rollwright.engines.routing import (
    BLOCK,
    LeastLoadedRouting,
    PrefixRouting,
    RoutingRule,
    StickyRouting,
)
from rollwright.errors import ConfigError
from rollwright.http.retry import FaultCause
from rollwright.trajectory import token_ids


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
    router = Router(3, StickyRouting(remembered=6))
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


def prompt(*parts: int, blocks: int = 2) -> "array[int]":
    """A prompt of which each part fills whole blocks."""
    return token_ids(part for part in parts for _ in range(blocks * BLOCK))


def test_members_of_a_group_come_together_where_their_prompt_was_computed() -> None:
    router = Router(4, PrefixRouting())
    homes = [router.pick(f"g{group}-m{member}", prompt(1, group)) for member in range(3) for group in (7, 8)]
    assert len(set(homes)) == 1  # they all share the first part, and nobody is busy
    for _ in range(20):
        router.begin(homes[0])  # type: ignore[arg-type]
    moved = router.pick("g9-m0", prompt(1, 9))
    assert moved != homes[0]  # too much to do there
    assert router.pick("g9-m1", prompt(1, 9)) == moved
    assert router.pick("g9-m0", prompt(1, 9, 3)) == moved


def test_a_server_whose_cache_is_gone_is_not_preferred() -> None:
    rule = PrefixRouting()
    router = Router(2, rule)
    home = router.pick("a", prompt(1, 2))
    assert home is not None
    router.begin(home)
    assert router.pick("b", prompt(1, 2, 3)) == home
    router.forget_caches(home)
    assert router.pick("c", prompt(1, 2)) == 1 - home


def test_short_prompts_and_text_are_routed_too() -> None:
    rule = PrefixRouting()
    assert [rule.choose(f"e{at}", token_ids([1, 2, 3]), {0: 0, 1: 0}) for at in range(4)] == [0, 1, 0, 1]
    assert rule.choose("a", None, {0: 1, 1: 0}) == rule.choose("a", None, {0: 0, 1: 5}) == 1


def test_each_call_goes_to_the_least_loaded_server_in_turns() -> None:
    router = Router(3, LeastLoadedRouting())
    assert [router.pick("e") for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    router.begin(0)
    assert {router.pick("e") for _ in range(6)} == {1, 2}


RULES = st.sampled_from([StickyRouting, LeastLoadedRouting, PrefixRouting])


@given(
    RULES, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sets(st.integers(0, 4), min_size=1)))
)
def test_every_rule_chooses_among_those_in_service_and_the_same_again(
    rule: type[RoutingRule], calls: list[tuple[int, int, set[int]]]
) -> None:
    first, second = rule(), rule()
    for number, part, servers in calls:
        loads = {server: (server * 7 + number) % 3 for server in sorted(servers)}
        chosen = first.choose(f"e{number}", prompt(0, part), loads)
        assert chosen in loads
        assert second.choose(f"e{number}", prompt(0, part), loads) == chosen


def test_what_prefixes_take_is_bounded() -> None:
    rule = PrefixRouting(remembered=10)
    for number in range(50):
        rule.choose(f"e{number}", prompt(number), {0: 0, 1: 0})
    assert len(rule._servers) <= 10
