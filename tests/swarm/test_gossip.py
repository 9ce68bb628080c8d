"""The gossip as a state machine: messages in, messages out, no network."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.swarm.gossip import CHECKED, FANOUT, PULLED_FROM_STRANGERS, SIGNED, Gossip
from rollwright.swarm.gossip_messages import (
    ID_BYTES,
    MAX_MESSAGE_BYTES,
    OFFERED,
    Delivery,
    GossipOffer,
    OfferReply,
    encode_delivery,
    manifest_id,
    read_message,
    sign_offer,
    sign_reply,
    swarm_mark,
)
from rollwright.swarm.identity import Identity
from rollwright.swarm.refusals import PeerRefused
from rollwright.swarm.signed import Manifest, sign_manifest
from rollwright.swarm.transports.base import PassedOver

INTERVAL, NOW = 5.0, 1_000_000.0


def gossip(identity: Identity | None = None, kind: type[Gossip] = Gossip) -> Gossip:
    return kind(
        identity or Identity.generate(), "s", interval=INTERVAL, hold_seconds=300.0, entropy=bytes(16)
    )


def manifest(identity: Identity, number: int = 1) -> bytes:
    told = Manifest("s", identity.peer, 1, number, NOW, "e", "v", number, "ab" * 32, 1, (0.0, 1.0))
    return sign_manifest(told, identity)


class Mesh:
    """Nodes whose messages arrive at once, in order."""

    def __init__(self, *nodes: Gossip) -> None:
        self.nodes = {each._identity.peer: each for each in nodes}
        self.now = NOW
        self.bytes = dict.fromkeys(self.nodes, 0)

    def pump(self, outgoing: list) -> None:  # type: ignore[type-arg]
        waiting = deque(outgoing)
        while waiting:
            peer, data = waiting.popleft()
            if peer in self.nodes:
                self.bytes[peer] += len(data)
                waiting.extend(self.nodes[peer].receive(data, self.now))

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += INTERVAL
            for node in self.nodes.values():
                self.pump(node.tick(self.now))


def met(*nodes: Gossip) -> Mesh:
    mesh = Mesh(*nodes)
    first = nodes[0]._identity.peer
    for node in nodes[1:]:
        mesh.pump(node.meet([first], NOW))
    return mesh


def test_manifests_reach_nodes_that_know_one_peer_only() -> None:
    keys = [Identity.generate() for _ in range(12)]
    nodes = [gossip(each) for each in keys]
    mesh = met(*nodes)
    for key, node in zip(keys, nodes, strict=True):
        node.announce(manifest(key), NOW)
    heard: dict[str, set[bytes]] = {each.peer: set() for each in keys}
    for _ in range(20):
        mesh.tick()
        for peer, node in mesh.nodes.items():
            heard[peer].update(node.take_arrived())
    assert min(map(len, heard.values())) >= 9, "nearly all of eleven others"


def test_what_a_node_receives_in_an_interval_does_not_grow_with_the_swarm() -> None:
    received = []
    for size in (12, 48):
        keys = [Identity.generate() for _ in range(size)]
        nodes = [gossip(each) for each in keys]
        mesh = met(*nodes)
        for step in range(6):
            for key, node in zip(keys, nodes, strict=True):
                node.announce(manifest(key, step + 1), mesh.now)
            if step == 2:
                mesh.bytes = dict.fromkeys(mesh.nodes, 0)
            mesh.tick()
        received.append(sum(mesh.bytes.values()) / size)
    assert received[1] < 1.4 * received[0]


def test_nobody_can_write_in_anothers_name() -> None:
    honest, liar, victim = Identity.generate(), Identity.generate(), gossip()
    forged = GossipOffer(swarm_mark("s"), honest.peer, victim._identity.peer, NOW, b"t" * 8, (), ())
    assert victim.receive(sign_offer(forged, liar), NOW) == []
    assert honest.peer not in victim.view
    (asked,) = victim.meet([honest.peer], NOW)
    opened = read_message(asked.data)
    assert isinstance(opened, GossipOffer)
    reply = OfferReply(opened.token, (), (b"i" * ID_BYTES,), ())
    assert victim.receive(sign_reply(reply, victim._identity.peer, liar), NOW) == []
    assert honest.peer not in victim.view
    assert victim.counts[PassedOver.JUNK_GOSSIP] == 2
    victim.receive(sign_reply(reply, victim._identity.peer, honest), NOW)
    assert honest.peer in victim.view


def test_an_offer_to_another_node_swarm_or_time_is_ignored() -> None:
    sender, node = Identity.generate(), gossip()
    own = node._identity.peer
    for mark, receiver, time in (
        (swarm_mark("other"), own, NOW),
        (swarm_mark("s"), Identity.generate().peer, NOW),
        (swarm_mark("s"), own, NOW - 10_000),
    ):
        offer = GossipOffer(mark, sender.peer, receiver, time, b"t" * 8, (), ())
        assert node.receive(sign_offer(offer, sender), NOW) == []
    assert len(node.view) == 0


def test_a_peer_that_offers_what_it_does_not_have_is_not_spoken_to_for_a_while() -> None:
    class Liar(Gossip):
        def _to_offer(self) -> list[bytes]:
            return [self._random.randbytes(ID_BYTES) for _ in range(OFFERED)]

    node, liar, honest = gossip(), gossip(kind=Liar), gossip()
    mesh = met(node, liar, honest)
    mesh.tick(12)
    assert liar._identity.peer not in node.view
    assert honest._identity.peer in node.view


def test_a_manifest_that_its_peer_did_not_sign_is_not_kept_and_its_bringer_is_blamed() -> None:
    node, bringer = gossip(), Identity.generate()
    good = manifest(bringer)
    junk = good[:-1] + bytes([good[-1] ^ 1])
    (asked,) = node.meet([bringer.peer], NOW)
    opened = read_message(asked.data)
    assert isinstance(opened, GossipOffer)
    reply = OfferReply(opened.token, (), (manifest_id(junk), manifest_id(good)), ())
    node.receive(sign_reply(reply, node._identity.peer, bringer), NOW)
    node.receive(encode_delivery(Delivery(opened.token, (junk, good))), NOW)
    assert node.take_arrived() == [good]
    assert node._faults[bringer.peer] == 1


def passed_on(node: Gossip, bringer: Identity, *envelopes: bytes) -> None:
    """The node opens an exchange, and gets these manifests."""
    (asked,) = node.meet([bringer.peer], NOW)
    opened = read_message(asked.data)
    assert isinstance(opened, GossipOffer)
    reply = OfferReply(opened.token, (), tuple(map(manifest_id, envelopes)), ())
    node.receive(sign_reply(reply, node._identity.peer, bringer), NOW)
    node.receive(encode_delivery(Delivery(opened.token, envelopes)), NOW)


def test_who_passed_on_an_accepted_group_gets_a_place_and_so_does_its_maker() -> None:
    node, bringer, maker = gossip(), Identity.generate(), Identity.generate()
    passed_on(node, bringer, manifest(maker))
    assert len(node.view) == 0, "nothing has been checked yet"
    node.prefer(maker.peer, NOW)
    assert node.view.members == {bringer.peer, maker.peer}


def test_who_opens_an_exchange_itself_earns_no_place_by_it() -> None:
    node, sender, maker = gossip(), Identity.generate(), Identity.generate()
    envelope = manifest(maker)
    offer = GossipOffer(
        swarm_mark("s"), sender.peer, node._identity.peer, NOW, b"t" * 8, (manifest_id(envelope),), ()
    )
    (answer,) = node.receive(sign_offer(offer, sender), NOW)
    reply = read_message(answer.data)
    assert isinstance(reply, OfferReply)
    assert reply.wanted == (manifest_id(envelope),)
    node.receive(encode_delivery(Delivery(b"t" * 8, (envelope,))), NOW)
    assert node.take_arrived() == [envelope]
    node.prefer(maker.peer, NOW)
    assert node.view.members == {maker.peer}


def test_a_peer_that_does_not_deliver_loses_its_place_until_it_has_delivered() -> None:
    node, peer, other = gossip(), Identity.generate(), Identity.generate()
    node.prefer(peer.peer, NOW)
    node._note_fault(peer.peer, NOW)
    assert peer.peer not in node.view
    node.prefer(peer.peer, NOW)
    assert peer.peer not in node.view, "a good group does not make up for it"
    passed_on(node, peer, manifest(other))
    node.prefer(peer.peer, NOW)
    assert peer.peer in node.view.members


def test_places_that_rest_on_an_accomplices_groups_alone_are_lost_with_it() -> None:
    node, accomplice, honest = gossip(), Identity.generate(), Identity.generate()
    censor, maker = Identity.generate(), Identity.generate()
    passed_on(node, accomplice, manifest(censor))
    node.prefer(censor.peer, NOW)
    passed_on(node, honest, manifest(censor, 2))
    node.prefer(censor.peer, NOW)
    passed_on(node, honest, manifest(maker))
    node.prefer(maker.peer, NOW)
    assert node.view.members == {accomplice.peer, censor.peer, honest.peer, maker.peer}
    node._note_fault(censor.peer, NOW)
    assert node.view.members == {honest.peer, maker.peer}


def test_signatures_are_counted_when_they_are_checked_or_made() -> None:
    node, bringer = gossip(), Identity.generate()
    passed_on(node, bringer, manifest(Identity.generate()), manifest(Identity.generate()))
    assert node.work == {CHECKED: 3, SIGNED: 1}, "a reply and two manifests; an offer"


def test_a_flood_of_offers_costs_a_bounded_number_of_answers_and_pulls() -> None:
    node = gossip()
    answers, wanted = 0, 0
    for _ in range(100):
        stranger = Identity.generate()
        ids = tuple(bytes([number]) * ID_BYTES for number in range(OFFERED))
        offer = GossipOffer(
            swarm_mark("s"), stranger.peer, node._identity.peer, NOW, stranger.sign(b"")[:8], ids, ()
        )
        for sent in node.receive(sign_offer(offer, stranger), NOW):
            reply = read_message(sent.data)
            assert isinstance(reply, OfferReply)
            answers += 1
            wanted += len(reply.wanted)
    assert answers <= 16 + 2
    assert wanted <= PULLED_FROM_STRANGERS
    assert len(node.tick(NOW + INTERVAL)) <= FANOUT


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 3), st.integers(0, 2000))
def test_no_bytes_crash_a_node_or_change_its_view(junk: bytes, kind: int, place: int) -> None:
    node, peer = gossip(), Identity.generate()
    heads = [b"", b"RWG\x01", b"RWG\x02", b"RWG\x03"]
    assert node.receive(heads[kind] + junk, NOW) == []
    offer = bytearray(
        sign_offer(GossipOffer(swarm_mark("s"), peer.peer, node._identity.peer, NOW, b"t" * 8, (), ()), peer)
    )
    offer[place % len(offer)] ^= 1 + place % 255
    assert node.receive(bytes(offer), NOW) == []
    assert len(node.view) == 0


def test_a_message_beyond_the_limit_is_not_decoded() -> None:
    with pytest.raises(PeerRefused):
        read_message(b"RWG\x03" + bytes(MAX_MESSAGE_BYTES))
