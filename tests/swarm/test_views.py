"""A node's partial view is bounded, fair to keys, and cannot be filled by those who speak most."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.swarm.views import (
    BANISHED_SECONDS,
    CALLERS,
    KEPT,
    NAMED_BY_ONE,
    PLACES,
    RESERVE,
    UNANSWERED,
    PeerView,
)

NOW = 1000.0


def name(number: int, kind: str = "a") -> str:
    return f"{kind}{number:063x}"


def view_of(number: int = 0) -> PeerView:
    return PeerView(name(0, "f"), number.to_bytes(32, "big"))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["add", "write", "accept", "prefer", "answer", "silence", "demote", "withdraw", "banish"]
            ),
            st.integers(0, 400),
        ),
        max_size=600,
    )
)
def test_a_view_is_bounded_whatever_happens(events: list[tuple[str, int]]) -> None:
    view = view_of()
    for time, (kind, number) in enumerate(events):
        peer, now = name(number), float(time)
        match kind:
            case "add":
                view.add(peer, name(number % 7))
            case "write":
                view.add(peer, peer)
            case "accept":
                view.accept(peer, now)
            case "prefer":
                view.prefer(peer, now)
            case "answer":
                view.note_answer(peer, now)
            case "silence":
                view.note_silence(peer, now)
            case "withdraw":
                view.withdraw(peer)
            case "demote":
                view.demote(peer, now)
            case "banish":
                view.banish(peer, now)
        assert len(view) <= PLACES + KEPT
        assert len(view._reserve) + len(view._callers) <= RESERVE
        assert sum(view._named.values()) == len(view._sources) <= len(view._reserve)
        assert all(peer in view for peer in view.draw(2))
        assert name(0, "f") not in view


def test_being_heard_of_gains_no_place_however_often() -> None:
    view = view_of()
    for number in range(50):
        for _ in range(20):
            view.add(name(number, "b"), name(number, "b"))
            view.add(name(number + 50, "b"), name(number, "b"))
            view.note_answer(name(number, "b"), NOW)
    assert len(view) == 0


def test_the_order_and_number_of_good_deeds_decide_nothing() -> None:
    once, often = view_of(), view_of()
    honest = [name(number) for number in range(100)]
    loud = [name(number, "b") for number in range(10)]
    for peer in [*honest, *loud]:
        once.accept(peer, NOW)
    for peer in [*loud * 50, *honest, *loud * 50]:
        often.accept(peer, NOW)
    assert once.members == often.members


def test_a_share_of_the_carriers_gets_that_share_of_the_places() -> None:
    held = []
    for secret in range(60):
        view = view_of(secret)
        for number in range(250):
            view.accept(name(number, "b" if number < 50 else "a"), NOW)
        held += [peer[0] == "b" for peer in view.members]
    assert 0.14 < sum(held) / len(held) < 0.26


def test_one_source_fills_no_more_than_its_share_of_the_reserve() -> None:
    view = view_of()
    for number in range(1000):
        if view.is_wanted(name(number, "b"), name(1, "c"), NOW):
            view.add(name(number, "b"), name(1, "c"))
    assert len(view._reserve) == NAMED_BY_ONE
    assert view.is_wanted(name(1, "d"), name(2, "c"), NOW), "another source may name some"


def test_those_who_only_write_are_a_small_part_of_what_is_tried() -> None:
    view = view_of()
    view.prefer(name(0), NOW)
    for number in range(60):
        view.add(name(number), name(1000 + number // 4))
    for number in range(5000):
        view.add(name(number, "b"), name(number, "b"))
    drawn = [peer for _ in range(1000) for peer in view.draw(1)]
    tried = [peer for peer in drawn if peer != name(0)]
    assert len(view._callers) == CALLERS
    assert sum(peer[0] == "b" for peer in tried) < 0.35 * len(tried)


def test_strangers_take_no_place_of_a_proven_peer_and_are_not_believed_about_others() -> None:
    view = view_of()
    proven = {name(number) for number in range(KEPT)}
    for peer in sorted(proven):
        view.prefer(peer, NOW)
    for number in range(5000):
        peer = name(number, "b")
        view.add(peer, peer)
    assert proven <= view.members
    assert not view.believes(name(3, "b"))
    assert view.believes(min(proven))
    drawn = [peer for _ in range(400) for peer in view.draw(2)]
    assert sum(peer in proven for peer in drawn) > 0.3 * len(drawn)


def test_only_members_are_named_to_others() -> None:
    view = view_of()
    for number in range(3):
        view.prefer(name(number), NOW)
        view.accept(name(number + 10), NOW)
        view.add(name(number, "b"), name(0))
    assert set(view.sample(8)) == {name(number) for number in (0, 1, 2, 10, 11, 12)}


def test_a_silent_member_leaves_its_place_and_may_earn_it_again() -> None:
    view = view_of()
    view.accept(name(1), NOW)
    for _ in range(UNANSWERED):
        assert name(1) in view.members
        view.note_silence(name(1), 100.0)
    assert name(1) not in view.members
    assert view.draw(1) == [name(1)], "after a partition, those of the reserve are tried"
    view.note_answer(name(1), 101.0)
    view.accept(name(1), 102.0)
    assert name(1) in view.members


def test_a_banished_peer_is_not_taken_back_for_a_while_whatever_its_own_groups_are_worth() -> None:
    view = view_of()
    view.prefer(name(1), 0.0)
    view.banish(name(1), 0.0)
    assert name(1) not in view
    view.note_answer(name(1), 1.0)
    for now in (1.0, BANISHED_SECONDS - 1):
        view.prefer(name(1), now)
        view.accept(name(1), now)
    assert len(view) == 0
    assert view.is_banished(name(1), BANISHED_SECONDS - 1)
    assert not view.is_banished(name(1), BANISHED_SECONDS + 1)
    view.prefer(name(1), BANISHED_SECONDS + 1)
    assert name(1) in view.members


def test_draws_follow_from_the_secret() -> None:
    def drawn(secret: int) -> list[list[str]]:
        view = view_of(secret)
        for number in range(80):
            view.accept(name(number), NOW)
        return [view.draw(3) for _ in range(20)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
