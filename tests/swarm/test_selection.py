"""The choice: nothing flat, everybody alike, nobody too often; and what was seen before is told apart."""

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rollwright.swarm.content import Recipe, SharedAction, SharedGroup, SharedMember
from rollwright.swarm.duplicates import SeenGroups
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.selection import STRANGERS, in_turns, is_flat, places
from rollwright.swarm.signed import Manifest
from rollwright.trajectory import FinishReason


def manifest(peer: int, number: int, rewards=(0.0, 1.0)) -> Manifest:
    return Manifest(
        "s",
        f"{peer:064x}",
        1,
        number + 1,
        0.0,
        "e",
        "v",
        number,
        f"{peer * 1000 + number:064x}",
        1,
        tuple(rewards),
    )


pools = st.lists(
    st.builds(
        manifest,
        st.integers(0, 5),
        st.integers(0, 99),
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4),
    ),
    max_size=40,
    unique_by=lambda each: each.digest,
)


def taken(pool, count, key, out=(), per_peer=None) -> list[Manifest]:
    order = in_turns(pool, (key,))
    return [order[place] for place in places(order, count, is_out=out.__contains__, per_peer=per_peer)]


@given(pools, st.integers(0, 10), st.none() | st.integers(1, 4), st.integers(), st.randoms())
def test_the_choice_keeps_its_rules_whatever_the_order(pool, count, per_peer, key, shuffled) -> None:
    chosen = taken(pool, count, key, per_peer=per_peer)
    available = Counter(each.peer for each in pool if not is_flat(each.rewards))
    most = per_peer or len(pool)
    assert len(chosen) == min(count, sum(min(most, number) for number in available.values()))
    assert len({each.digest for each in chosen}) == len(chosen)
    assert not any(is_flat(each.rewards) for each in chosen)
    mixed = list(pool)
    shuffled.shuffle(mixed)
    assert taken(mixed, count, key, per_peer=per_peer) == chosen


@given(pools, st.integers(0, 10), st.integers())
def test_nobody_gives_more_than_another_that_has_something_left(pool, count, key) -> None:
    chosen = Counter(each.peer for each in taken(pool, count, key))
    available = Counter(each.peer for each in pool if not is_flat(each.rewards))
    left = [chosen[peer] for peer in available if chosen[peer] < available[peer]]
    assert not left or max(chosen.values(), default=0) <= min(left) + 1


@given(pools, st.integers(0, 10), st.none() | st.integers(1, 4), st.integers(), st.sets(st.integers(0, 99)))
def test_a_peer_whose_groups_are_all_refused_might_as_well_not_be_there(
    pool, count, per_peer, key, refused
) -> None:
    out = [each for each in pool if each.peer == f"{0:064x}" or each.index in refused]
    others = [each for each in pool if each.peer != f"{0:064x}"]
    assert taken(pool, count, key, out, per_peer) == taken(others, count, key, out, per_peer)


def test_no_number_of_strangers_stands_in_front_of_those_whose_groups_held_up() -> None:
    proven = [f"{peer:064x}" for peer in range(3)]
    pool = [manifest(peer, number) for peer in range(300) for number in range(2)]
    came_early: Counter[str] = Counter()
    for key in range(50):
        order = [
            each.peer for each in in_turns(pool, (key,), proven=proven, silent=[proven[2], f"{299:064x}"])
        ]
        first, early = order[:300], order[: 2 + STRANGERS]
        assert len(set(first)) == 300, "one of every peer comes before a second of anybody"
        assert set(proven[:2]) <= set(early)
        assert set(first[-2:]) == {proven[2], f"{299:064x}"}
        came_early.update(early)
    assert len(came_early) > 200, "which strangers come early is drawn anew"
    assert in_turns(pool, (1,)) == in_turns(pool, (1,), proven=["f" * 64]), "without them all are alike"


def test_flat_groups_are_left_out_before_the_draw() -> None:
    pool = [manifest(1, number, (1.0, 1.0)) for number in range(50)] + [manifest(2, 0), manifest(3, 0)]
    for key in range(20):
        assert {each.peer for each in taken(pool, 2, key)} == {f"{2:064x}", f"{3:064x}"}


def test_the_draw_is_uniform_over_the_groups_where_all_have_as_many() -> None:
    pool = [manifest(peer, number) for peer in range(4) for number in range(2)]
    drawn = Counter(each.digest for key in range(2000) for each in taken(pool, 2, key))
    assert len(drawn) == 8
    assert all(400 < times < 600 for times in drawn.values())


def test_whoever_announces_more_is_not_drawn_more_often() -> None:
    pool = [manifest(0, number) for number in range(32)] + [manifest(peer, 0) for peer in range(1, 4)]
    drawn = Counter(each.peer for key in range(2000) for each in taken(pool, 2, key))
    assert all(900 < times < 1100 for times in drawn.values())


LONG = "the box stands left of its target so I walk around it and push it right twice then " * 3


def group(*texts: str, peer: int = 1, index: int = 0, task: str = "ab" * 32) -> SharedGroup:
    members = tuple(SharedMember((SharedAction(text, b"", FinishReason.STOP),), 0.0) for text in texts)
    return SharedGroup(1, f"{peer:064x}", Recipe("e", "v", 1, index, task), "t", members)


def reason(seen: SeenGroups, digest: str, shared: SharedGroup) -> PeerRefusal | None:
    try:
        seen.check(digest, shared)
    except PeerRefused as refused:
        return refused.reason
    return None


def varied(number: int) -> str:
    return " ".join(f"word{number * 100 + place}" for place in range(60))


def test_the_same_bytes_and_the_same_task_are_told_apart() -> None:
    seen = SeenGroups()
    first = group(varied(1), varied(2))
    assert reason(seen, "d1", first) is None
    seen.add("d1", first)
    assert reason(seen, "d1", first) is PeerRefusal.DUPLICATE
    assert reason(seen, "d2", group(varied(3), varied(4))) is PeerRefusal.DUPLICATE_TASK
    assert reason(seen, "d2", group(varied(3), varied(4), peer=2)) is None


def test_a_copy_with_changed_words_in_another_order_under_another_name_is_found() -> None:
    seen = SeenGroups()
    seen.add("d1", group(varied(1), varied(2), varied(3)))
    copied = [varied(number).replace(f"word{number}30", "another") for number in (3, 1, 2)]
    assert reason(seen, "d2", group(*copied, peer=2, index=9, task="cd" * 32)) is PeerRefusal.NEAR_DUPLICATE


def test_groups_that_share_few_answers_are_different() -> None:
    seen = SeenGroups()
    seen.add("d1", group(varied(1), varied(2), varied(3)))
    assert reason(seen, "d2", group(varied(1), varied(5), varied(6), peer=2)) is None


def test_short_answers_may_repeat_in_other_tasks() -> None:
    seen = SeenGroups()
    seen.add("d1", group("<answer>5</answer>", "<answer>7</answer>"))
    other = group("<answer>5</answer>", "<answer>7</answer>", peer=2, task="cd" * 32)
    assert reason(seen, "d2", other) is None
    same = msgspec.structs.replace(other, recipe=msgspec.structs.replace(other.recipe, task="ab" * 32))
    assert reason(seen, "d2", same) is PeerRefusal.NEAR_DUPLICATE


def test_what_is_remembered_is_bounded_and_survives_a_restart() -> None:
    seen = SeenGroups(remembered=3)
    for number in range(10):
        seen.add(f"d{number}", group(varied(number), varied(number + 50), index=number))
    assert [digest for digest, _ in seen.snapshot()] == ["d7", "d8", "d9"]
    assert len(seen._owners) <= 3 * 2 * 16
    assert reason(seen, "d0", group(varied(0), varied(50), index=0)) is None
    again = SeenGroups(remembered=3)
    again.restore(seen.snapshot())
    assert reason(again, "d9", group(varied(90), varied(91), index=90)) is PeerRefusal.DUPLICATE
    assert reason(again, "d99", group(varied(90), varied(91), index=9)) is PeerRefusal.DUPLICATE_TASK
