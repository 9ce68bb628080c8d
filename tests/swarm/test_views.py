"""A node's partial view is bounded, fair to keys, and cannot be filled by those who speak most."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.swarm.views import (
    BANISHED_SECONDS,
    ENOUGH,
    KEPT,
    NAMED_BY_ONE,
    PLACES,
    RESERVE,
    UNANSWERED,
    PeerView,
)


def name(number: int, kind: str = "a") -> str:
    return f"{kind}{number:063x}"


def view_of(number: int = 0) -> PeerView:
    return PeerView(name(0, "f"), number.to_bytes(32, "big"))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "prefer", "answer", "silence", "banish"]), st.integers(0, 400)),
        max_size=600,
    )
)
def test_a_view_is_bounded_whatever_happens(events: list[tuple[str, int]]) -> None:
    view = view_of()
    for time, (kind, number) in enumerate(events):
        peer = name(number)
        match kind:
            case "add":
                view.add(peer, name(number % 7))
            case "prefer":
                view.prefer(peer)
            case "answer":
                view.note_answer(peer)
            case "silence":
                view.note_silence(peer, float(time))
            case "banish":
                view.banish(peer, float(time))
        assert len(view) <= PLACES + KEPT
        assert view.members.issuperset(view.draw(2)) or len(view._reserve) <= RESERVE
        assert name(0, "f") not in view.members


def test_being_named_often_or_first_gains_nothing() -> None:
    once, often = view_of(), view_of()
    honest = [name(number) for number in range(100)]
    loud = [name(number, "b") for number in range(10)]
    for peer in [*honest, *loud]:
        once.add(peer, peer)
    for peer in [*loud * 50, *honest, *loud * 50]:
        often.add(peer, peer)
    assert once.members == often.members


def test_a_share_of_the_keys_gets_that_share_of_the_places() -> None:
    held = []
    for secret in range(60):
        view = view_of(secret)
        for number in range(250):
            peer = name(number, "b" if number < 50 else "a")
            view.add(peer, peer)
        held += [peer[0] == "b" for peer in view.members]
    assert 0.14 < sum(held) / len(held) < 0.26


def test_one_source_fills_no_more_than_its_share() -> None:
    view = view_of()
    for number in range(1000):
        view.add(name(number, "b"), name(1, "c"))
    assert len(view) == NAMED_BY_ONE
    assert view.believes(name(1, "c")) is (ENOUGH > NAMED_BY_ONE)


def test_strangers_take_no_place_of_a_proven_peer_and_are_not_believed_about_others() -> None:
    view = view_of()
    proven = {name(number) for number in range(KEPT)}
    for peer in sorted(proven):
        view.prefer(peer)
    for number in range(5000):
        peer = name(number, "b")
        view.add(peer, peer)
    assert proven <= view.members
    assert not view.believes(name(3, "b"))
    assert view.believes(min(proven))
    drawn = [peer for _ in range(400) for peer in view.draw(2)]
    assert sum(peer in proven for peer in drawn) > 0.3 * len(drawn)


def test_a_silent_member_leaves_its_place_and_returns_when_it_is_heard_of_again() -> None:
    view = view_of()
    view.add(name(1), name(1))
    for _ in range(UNANSWERED):
        assert name(1) in view.members
        view.note_silence(name(1), 100.0)
    assert name(1) not in view.members
    assert not view.is_wanted(name(1), name(2), 99.0), "an old record tells nothing new"
    assert view.is_wanted(name(1), name(2), 101.0)
    assert view.draw(1) == [name(1)], "after a partition, those of the reserve are tried"
    view.note_answer(name(1))
    assert name(1) in view.members


def test_a_banished_peer_is_not_taken_back_for_a_while() -> None:
    view = view_of()
    view.add(name(1), name(1))
    view.banish(name(1), 0.0)
    assert name(1) not in view
    assert view.is_banished(name(1), BANISHED_SECONDS - 1)
    assert not view.is_banished(name(1), BANISHED_SECONDS + 1)


def test_draws_follow_from_the_secret() -> None:
    def drawn(secret: int) -> list[list[str]]:
        view = view_of(secret)
        for number in range(80):
            view.add(name(number), name(number))
        return [view.draw(3) for _ in range(20)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
