"""What a round takes follows from the draw and from what the groups are, not from who is quick or who is refused."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.swarm.content import Recipe, SharedAction, SharedGroup, SharedMember
from rollwright.swarm.duplicates import SeenGroups
from rollwright.swarm.gathering import Gathering, GroupCheck
from rollwright.swarm.refusals import BLAMED, PeerRefusal, PeerRefused
from rollwright.swarm.selection import in_turns
from rollwright.swarm.signed import Manifest
from rollwright.swarm.verification import Verified
from rollwright.trajectory import FinishReason

PEERS = 5
STRIKES = 2


class Kind:
    """What a group is found to be, and how long that takes."""

    def __init__(self, peer: int, number: int, refusal: PeerRefusal | None, text: int, delay: int) -> None:
        self.peer = f"{peer:064x}"
        self.digest = f"{peer * 1000 + number:064x}"
        self.refusal = refusal
        self.text = text
        self.delay = delay
        self.manifest = Manifest(
            "s", self.peer, 1, number + 1, 0.0, "e", "v", number, self.digest, 1, (0.0, 1.0)
        )
        member = SharedMember((SharedAction(f"{text}", b"", FinishReason.STOP),), 0.0)
        self.group = SharedGroup(1, self.peer, Recipe("e", "v", 1, number, "ab" * 32), "t", (member, member))


class Round:
    """A gathering over such groups, with a quarantine that counts strikes."""

    def __init__(self, kinds: Sequence[Kind], count: int, beam_size: int = 3, key: int = 0) -> None:
        self._kinds = {each.digest: each for each in kinds}
        self._caught: set[str] = set()
        self._strikes: Counter[str] = Counter()
        self.asked: list[str] = []
        self.together = 0
        self.most_together = 0
        self.gathering = Gathering(
            in_turns([each.manifest for each in kinds], (key,)),
            count,
            per_peer=None,
            beam_size=beam_size,
            seen=SeenGroups(),
            checker=self,
            peers=self,
        )

    async def check(self, look: GroupCheck) -> None:
        kind = self._kinds[look.manifest.digest]
        self.asked.append(kind.peer)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            for _ in range(kind.delay):
                await asyncio.sleep(0)
        finally:
            self.together -= 1
        if kind.refusal is PeerRefusal.NOT_FETCHED:
            look.timed_out = True
            raise PeerRefused(kind.refusal)
        look.data, look.group = b"came", kind.group
        if kind.refusal is not None:
            raise PeerRefused(kind.refusal)
        look.verified = Verified([], off_policy=False)

    def is_caught(self, peer: str) -> bool:
        return peer in self._caught

    def is_proven(self, peer: str) -> bool:
        return False

    def judge(self, look: GroupCheck) -> None:
        peer = look.manifest.peer
        if look.refused is None:
            self._strikes[peer] = 0
            return
        self._strikes[peer] += look.refused.reason is PeerRefusal.WRONG_TOKENS
        if look.refused.reason in BLAMED or self._strikes[peer] >= STRIKES:
            self._caught.add(peer)

    def taken(self) -> list[str]:
        asyncio.run(self.gathering.run())
        return self.results()

    def results(self) -> list[str]:
        return [look.manifest.digest for look in self.gathering.results()[0]]


refusals = st.sampled_from(
    [
        None,
        None,
        None,
        PeerRefusal.WRONG_REWARD,
        PeerRefusal.WRONG_TOKENS,
        PeerRefusal.TOO_LONG,
        PeerRefusal.NOT_FETCHED,
    ]
)
pools = st.lists(
    st.builds(
        Kind,
        st.integers(0, PEERS - 1),
        st.integers(0, 20),
        refusals,
        text=st.integers(0, 12),
        delay=st.integers(0, 5),
    ),
    max_size=16,
    unique_by=lambda each: each.digest,
)


def slowed(kinds: Sequence[Kind], delays: Sequence[int]) -> list[Kind]:
    """The same groups, each found out about in another time."""
    return [
        Kind(int(each.peer, 16), each.manifest.index, each.refusal, each.text, delays[place % len(delays)])
        for place, each in enumerate(kinds)
    ]


@settings(deadline=None)
@given(pools, st.integers(1, 6), st.integers(1, 5), st.integers(0, 50))
def test_a_peer_of_which_nothing_is_taken_might_as_well_not_be_there(pool, count, beam_size, key) -> None:
    taken = Round(pool, count, beam_size, key).taken()
    givers = {each.peer for each in pool if each.digest in taken}
    for peer in {each.peer for each in pool} - givers:
        others = [each for each in pool if each.peer != peer]
        assert Round(others, count, beam_size, key).taken() == taken


@settings(deadline=None)
@given(
    pools,
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 50),
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
)
def test_who_is_quick_makes_no_difference(pool, count, beam_size, key, delays) -> None:
    taken = Round(pool, count, beam_size, key).taken()
    assert Round(slowed(pool, delays), count, 1, key).taken() == taken
    assert Round(slowed(pool, delays), count, beam_size, key).taken() == taken


@settings(deadline=None)
@given(pools, st.integers(1, 6), st.integers(1, 5), st.integers(0, 50))
def test_no_place_stays_empty_while_something_good_is_left(pool, count, beam_size, key) -> None:
    good = [Kind(int(each.peer, 16), each.manifest.index, None, place, 1) for place, each in enumerate(pool)]
    round = Round(good, count, beam_size, key)
    assert len(round.taken()) == min(count, len(pool))
    assert round.most_together <= beam_size
    assert len(round.asked) <= count, "nothing is checked in vain"


@pytest.mark.parametrize("first_is_slow", [False, True])
def test_of_two_that_repeat_each_other_the_first_by_lot_is_taken(first_is_slow: bool) -> None:
    one, two = Kind(1, 0, None, text=7, delay=0), Kind(2, 0, None, text=7, delay=0)
    first = in_turns([one.manifest, two.manifest], (0,))[0].digest
    for each in (one, two):
        each.delay = 20 if (each.digest == first) == first_is_slow else 0
    assert Round([one, two], 2).taken() == [first]


def test_a_peer_that_does_not_answer_is_asked_once_in_a_round() -> None:
    silent = [Kind(1, number, PeerRefusal.NOT_FETCHED, number, 50) for number in range(8)]
    honest = [Kind(2, number, None, 50 + number, 1) for number in range(3)]
    round = Round([*silent, *honest], 4, beam_size=8)
    assert set(round.taken()) == {each.digest for each in honest}
    assert round.asked.count(silent[0].peer) == 1


def test_a_peer_that_is_caught_leaves_its_places_to_others() -> None:
    mixed = [
        Kind(1, number, PeerRefusal.WRONG_REWARD if number else None, number, number) for number in range(4)
    ]
    honest = [Kind(2, number, None, 50 + number, 9) for number in range(6)]
    for key in range(20):
        taken = Round([*mixed, *honest], 6, beam_size=8, key=key).taken()
        assert len(taken) == 6
        assert {each.peer for each in honest if each.digest in taken} == {honest[0].peer}


async def test_a_round_that_runs_out_of_time_keeps_what_was_found() -> None:
    stuck, honest = Kind(1, 0, None, 1, 10**9), Kind(2, 0, None, 2, 1)
    round = Round([stuck, honest], 2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(round.gathering.run(), 0.2)
    assert round.results() == [honest.digest]
    assert round.together == 0, "nothing is left behind"
