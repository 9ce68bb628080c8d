"""Manifests: one form, signed, and let through once, while they are fresh."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import FormatError
from rollwright.swarm.admission import WINDOW, Admission, Candidates
from rollwright.swarm.content import SharedGroup, decode
from rollwright.swarm.identity import Identity
from rollwright.swarm.msgpack_guard import check_shape
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.signed import PROTOCOL, Manifest, open_signed, sign_manifest

SENDER, RECEIVER = Identity.generate(), Identity.generate()
NOW = 1_800_000_000.0


def manifest(identity: Identity = SENDER, **changes) -> Manifest:
    plain = {
        "swarm": "s",
        "peer": identity.peer,
        "round": 10,
        "sequence": 1,
        "created": NOW,
        "env": "FrozenLake",
        "env_version": "v",
        "index": 3,
        "digest": "ab" * 32,
        "size": 100,
        "rewards": (0.0, 1.0),
    }
    return Manifest(**{**plain, **changes})


def gate(**freshness) -> Admission:
    return Admission("s", RECEIVER.peer, **{"max_round_lead": 1000, **freshness})


def reason(call, *arguments, **named) -> PeerRefusal:
    with pytest.raises(PeerRefused) as refused:
        call(*arguments, **named)
    return refused.value.reason


def test_what_is_sealed_is_what_is_unsealed() -> None:
    assert open_signed(sign_manifest(manifest(), SENDER)) == manifest()
    assert len(sign_manifest(manifest(), SENDER)) < 512


def test_any_changed_bit_is_refused() -> None:
    sealed = sign_manifest(manifest(), SENDER)
    for place in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(PeerRefused):
            open_signed(bytes(changed))


@given(st.integers(0, 600), st.binary(max_size=40))
def test_cut_and_lengthened_envelopes_are_refused(cut: int, tail: bytes) -> None:
    sealed = sign_manifest(manifest(), SENDER)
    changed = sealed[:cut] + tail
    if changed != sealed:
        with pytest.raises(PeerRefused):
            open_signed(changed)


def test_nobody_signs_for_another() -> None:
    assert reason(open_signed, sign_manifest(manifest(RECEIVER), SENDER)) is PeerRefusal.BAD_SIGNATURE


def test_another_protocol_is_told_apart_from_nonsense() -> None:
    sealed = sign_manifest(manifest(), SENDER)
    newer = sealed[:3] + bytes([PROTOCOL + 1]) + sealed[4:]
    assert reason(open_signed, newer) is PeerRefusal.OTHER_PROTOCOL
    assert reason(open_signed, b"hello") is PeerRefusal.MALFORMED
    assert reason(open_signed, b"") is PeerRefusal.MALFORMED


def test_another_form_of_the_same_manifest_is_refused() -> None:
    body = msgspec.msgpack.encode(manifest())
    wide = body.replace(b"\x64" + b"\x92", b"\xcd\x00\x64" + b"\x92")
    assert len(wide) == len(body) + 2
    assert msgspec.msgpack.decode(wide, type=Manifest) == manifest()
    header, domain = b"RWM" + bytes([PROTOCOL]), b"rollwright swarm manifest\x00"
    assert reason(open_signed, header + SENDER.sign(domain + header + wide) + wide) is PeerRefusal.MALFORMED
    assert open_signed(header + SENDER.sign(domain + header + body) + body) == manifest()


@pytest.mark.parametrize(
    "changes",
    [
        {"round": -1},
        {"sequence": 0},
        {"size": -1},
        {"digest": "AB" * 32},
        {"digest": "ab" * 32 + "\n"},
        {"env": ""},
        {"env": "x" * 200},
        {"rewards": (1.0,)},
        {"rewards": (float("nan"), 1.0)},
        {"created": float("inf")},
        {"rewards": (0.0,) * 65},
    ],
)
def test_values_outside_their_limits_are_refused(changes) -> None:
    assert reason(open_signed, sign_manifest(manifest(**changes), SENDER)) is PeerRefusal.MALFORMED


def test_a_manifest_passes_once() -> None:
    door = gate()
    sealed = sign_manifest(manifest(), SENDER)
    assert door.admit(sealed, round=10, now=NOW) == manifest()
    assert reason(door.admit, sealed, round=10, now=NOW) is PeerRefusal.REPLAY


def test_a_restart_forgets_nothing() -> None:
    door = gate()
    door.admit(sign_manifest(manifest(), SENDER), round=10, now=NOW)
    again = gate()
    again.restore(door.snapshot())
    assert reason(again.admit, sign_manifest(manifest(), SENDER), round=10, now=NOW) is PeerRefusal.REPLAY
    assert again.rounds() == {SENDER.peer: 10}
    with pytest.raises(FormatError):
        again.restore(b"\x93nonsense")


@given(st.permutations(range(1, 30)), st.lists(st.integers(1, 29), max_size=20))
@settings(max_examples=25)
def test_order_does_not_matter_and_replays_do_not_pass(order, replayed) -> None:
    door = gate()
    sealed = {number: sign_manifest(manifest(sequence=number), SENDER) for number in order}
    for number in order:
        assert door.admit(sealed[number], round=10, now=NOW).sequence == number
    for number in replayed:
        assert reason(door.admit, sealed[number], round=10, now=NOW) is PeerRefusal.REPLAY


def test_what_lies_behind_the_window_counts_as_seen() -> None:
    door = gate(manifests_per_round=2 * WINDOW)
    for number in range(100, 100 + 3 * WINDOW, 2):
        door.admit(sign_manifest(manifest(sequence=number), SENDER), round=10, now=NOW)
    for forgotten in (5, 100, 101, 102 + WINDOW // 2):
        sealed = sign_manifest(manifest(sequence=forgotten), SENDER)
        assert reason(door.admit, sealed, round=10, now=NOW) is PeerRefusal.REPLAY
    door.admit(sign_manifest(manifest(sequence=99 + 3 * WINDOW), SENDER), round=10, now=NOW)
    assert len(door._peers[SENDER.peer].digests) == WINDOW


def test_two_manifests_with_one_number_are_found() -> None:
    door = gate()
    door.admit(sign_manifest(manifest(), SENDER), round=10, now=NOW)
    assert (
        reason(door.admit, sign_manifest(manifest(index=9), SENDER), round=10, now=NOW)
        is PeerRefusal.EQUIVOCATION
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"swarm": "other"}, PeerRefusal.OTHER_SWARM),
        ({"round": 6}, PeerRefusal.OLD_ROUND),
        ({"round": 2000}, PeerRefusal.FUTURE_ROUND),
        ({"created": NOW - 3600}, PeerRefusal.CLOCK_SKEW),
        ({"created": NOW + 3600}, PeerRefusal.CLOCK_SKEW),
        ({"size": 1 << 30}, PeerRefusal.TOO_LARGE),
    ],
)
def test_what_is_not_of_here_and_now_is_refused(changes, expected) -> None:
    assert reason(gate().admit, sign_manifest(manifest(**changes), SENDER), round=10, now=NOW) is expected


def test_the_edges_of_freshness_pass() -> None:
    door = gate()
    for number, (round, skew) in enumerate([(7, 0), (10, 299), (10, -299), (1010, 0)], start=1):
        sent = manifest(sequence=number, round=round, created=NOW + skew)
        assert door.admit(sign_manifest(sent, SENDER), round=10, now=NOW) == sent


def test_own_manifests_and_those_of_caught_peers_are_refused() -> None:
    door = Admission("s", SENDER.peer)
    assert reason(door.admit, sign_manifest(manifest(), SENDER), round=10, now=NOW) is PeerRefusal.OWN
    door = Admission("s", RECEIVER.peer, is_quarantined={SENDER.peer}.__contains__)
    assert reason(door.admit, sign_manifest(manifest(), SENDER), round=10, now=NOW) is PeerRefusal.QUARANTINED


def test_a_forgery_changes_nothing() -> None:
    door = gate()
    sealed = sign_manifest(manifest(sequence=5), SENDER)
    forged = sealed[:4] + bytes(64) + sealed[68:]
    assert reason(door.admit, forged, round=10, now=NOW) is PeerRefusal.BAD_SIGNATURE
    assert door.rounds() == {}
    door.admit(sealed, round=10, now=NOW)


def test_one_peer_has_a_quota_in_each_round() -> None:
    door = gate(manifests_per_round=2)
    sealed = [sign_manifest(manifest(sequence=number), SENDER) for number in range(1, 5)]
    for each in sealed[:2]:
        door.admit(each, round=10, now=NOW)
    assert reason(door.admit, sealed[2], round=10, now=NOW) is PeerRefusal.OVER_QUOTA
    door.admit(sealed[3], round=11, now=NOW)
    other = Identity.generate()
    door.admit(sign_manifest(manifest(other), other), round=10, now=NOW)


def test_absurd_rounds_do_not_count_as_told() -> None:
    door = gate()
    assert (
        reason(door.admit, sign_manifest(manifest(round=10**9), SENDER), round=10, now=NOW)
        is PeerRefusal.FUTURE_ROUND
    )
    assert door.rounds() == {SENDER.peer: 0}


def test_who_announces_much_makes_room_for_who_announces_little() -> None:
    quiet, loud = Identity.generate(), [Identity.generate() for _ in range(20)]
    waiting = Candidates(limit=30)
    for number in range(3):
        waiting.add(manifest(quiet, digest=f"{number:064x}"), b"quiet")
    refused: Counter[PeerRefusal] = Counter()
    for number in range(10):
        for key in loud:
            try:
                waiting.add(manifest(key, digest=f"{number:064x}"), b"loud")
            except PeerRefused as error:
                refused[error.reason] += 1
    peers = Counter(each.peer for each in waiting.fresh(lambda each: True))
    assert len(waiting) == 30
    assert set(refused) == {PeerRefusal.OVER_QUOTA}
    assert peers[quiet.peer] >= 1
    assert set(peers) == {quiet.peer, *(each.peer for each in loud)}
    waiting.take(manifest(quiet, digest=f"{2:064x}"))
    assert len(waiting) == 29


def test_candidates_grow_old_and_come_once() -> None:
    waiting = Candidates()
    waiting.add(manifest(), b"envelope")
    assert reason(waiting.add, manifest(sequence=2), b"") is PeerRefusal.DUPLICATE
    other = Identity.generate()
    waiting.add(manifest(other), b"")
    assert len(waiting.fresh(lambda each: True)) == 2
    assert waiting.envelope(manifest()) == b"envelope"
    waiting.take(manifest())
    assert waiting.fresh(lambda each: False) == []
    assert len(waiting) == 0


HEADERS = {
    "1 GiB array": b"\xdd\x40\x00\x00\x00",
    "1 GiB map": b"\xdf\x40\x00\x00\x00",
    "4 GiB text": b"\xdb\xff\xff\xff\xff",
    "4 GiB binary": b"\xc6\xff\xff\xff\xff",
    "4 GiB extension": b"\xc9\xff\xff\xff\xff\x01",
    "small extension": b"\xd4\x01\x00",
    "deep arrays": b"\x91" * 100_000 + b"\xc0",
    "deep maps": b"\x81\xc0" * 100_000 + b"\xc0",
    "many items": b"\xdc\xff\xff" + b"\x01" * 65_535,
    "never used": b"\xc1",
    "two values": b"\x01\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=list(HEADERS))
def test_shapes_that_could_hurt_are_refused_before_they_are_decoded(data: bytes) -> None:
    with pytest.raises(FormatError):
        check_shape(data, max_items=16_384, max_depth=5)
    assert reason(decode, data) is PeerRefusal.MALFORMED_CONTENT


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(plain)
def test_the_look_over_agrees_with_the_decoder_on_what_is_whole(value) -> None:
    data = msgspec.msgpack.encode(value)
    check_shape(data, max_items=10_000, max_depth=100)
    for cut in range(len(data)):
        with pytest.raises(FormatError):
            check_shape(data[:cut], max_items=10_000, max_depth=100)
    assert reason(decode, data) in {PeerRefusal.MALFORMED_CONTENT, PeerRefusal.TOO_LARGE}


def test_a_group_carries_no_question_answer_test_or_scorer() -> None:
    def fields(kind) -> set[str]:
        return set(kind.__struct_fields__)

    from rollwright.swarm.content import Recipe, SharedAction, SharedMember

    assert fields(SharedGroup) == {"protocol", "peer", "recipe", "tokenizer", "members"}
    assert fields(Recipe) == {"env", "env_version", "seed", "index", "task"}
    assert fields(SharedMember) == {"actions", "reward"}
    assert fields(SharedAction) == {"text", "ids", "finish"}
