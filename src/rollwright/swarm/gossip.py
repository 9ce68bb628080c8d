"""Gossip of manifests over a partial view: offer ids to a few peers, pull the wanted ones.

Pure: a message or a tick in, messages out; the clock is an argument, the draws are keyed by a secret of the node. Invariants:
- What a node sends and pulls in an interval is bounded by constants, whatever the size of the swarm and whatever arrives:
  `FANOUT` offers of its own, `ANSWERED` replies, the manifests of `PULLED` and `PULLED_FROM_STRANGERS`.
- Nothing unsigned is kept or passed on, and no peer can write in another's name (`gossip_messages`).
- A peer that does not answer, does not deliver what it offered, or delivers junk leaves the view (`views`); one that passes
  nothing on costs its own links only, because every manifest is offered by several peers.
- Memory is bounded: held manifests, open exchanges, records.

One exchange, opened by A: A's offer (ids, records) -> B's reply (wanted ids, own ids, records) -> A's delivery (wanted
manifests, wanted ids) -> B's delivery. So a node that joins gets manifests by asking, before anybody knows it.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from rollwright.swarm.gossip_messages import (
    DELIVERED,
    OFFERED,
    RECORDS,
    TOKEN_BYTES,
    Delivery,
    GossipOffer,
    OfferReply,
    PeerRecord,
    check_offer,
    check_reply,
    encode_delivery,
    is_genuine,
    manifest_id,
    read_message,
    read_record,
    sign_offer,
    sign_record,
    sign_reply,
    swarm_mark,
)
from rollwright.swarm.identity import Identity
from rollwright.swarm.refusals import PeerRefused
from rollwright.swarm.signed import open_signed
from rollwright.swarm.transports.base import PassedOver
from rollwright.swarm.views import MOST_KNOWN, PeerView

FANOUT = 2
"""Exchanges that a node opens in an interval; as many are opened with it on average."""

ANSWERED = 16
"""Offers that a node answers in an interval: a view of average popularity gets two."""

LEARNT = 2
"""Offers in an interval whose senders may enter the view: what honest nodes send on average."""

PULLED = 8
"""Manifests pulled in an interval in the exchanges that this node opened; as many again from members that opened one."""

PULLED_FROM_ONE = 4
"""Of them in one exchange."""

PULLED_FROM_STRANGERS = 2
"""Manifests pulled in an interval from strangers that opened an exchange: those who open many, and offer what they do not have,
use up nobody else's share."""

FAULTS = 2
"""Exchanges in a row in which a peer did not deliver all that it had offered and was asked for. The first may be bad luck and
costs the peer its place, the second leads to silence."""

_FAULTY = 1024
"""Peers whose last fault is remembered."""

HELD = 512
"""Manifests held to be offered; the oldest are dropped."""

OFFERED_FRESH = 64
"""The newest held manifests, from which offers are drawn."""

OWN = 8
"""Own manifests that are in every offer, the newest."""

RECORD_SECONDS = 1800.0
"""Age up to which a record is believed: the peer was there then."""

RENEW_SECONDS = 300.0
"""Age at which a node signs a new record of itself."""

ANSWER_INTERVALS = 2
"""Intervals in which an answer must arrive."""

_OPEN = 256
"""Open exchanges; far more than an honest node has in `ANSWER_INTERVALS`."""

_PENDING = 4096
"""Wanted ids that are remembered, so that a manifest is not pulled twice at the same time."""


CHECKED, SIGNED = "checked", "signed"
"""Keys of `Gossip.work`."""


class Outgoing(NamedTuple):
    """A message to send."""

    peer: str
    data: bytes


class _Share(NamedTuple):
    """Manifests that one kind of exchange may pull in an interval."""

    kind: str
    from_one: int
    in_all: int


_CHOSEN = _Share("chosen", PULLED_FROM_ONE, PULLED)
_MEMBERS = _Share("members", PULLED_FROM_ONE, PULLED)
_STRANGERS = _Share("strangers", PULLED_FROM_STRANGERS, PULLED_FROM_STRANGERS)


@dataclass
class _Opened:
    """An exchange that this node opened or answered."""

    peer: str
    ends: float
    """When an answer is overdue."""
    answered: bool
    """Whether the peer has nothing more to answer."""
    offered: frozenset[bytes]
    """Ids that this node offered in it."""
    opened_here: bool = True
    """Whether this node chose the peer."""
    wanted: set[bytes] = field(default_factory=set)
    """Ids that this node waits for."""


class Gossip:
    def __init__(
        self,
        identity: Identity,
        swarm: str,
        *,
        interval: float,
        hold_seconds: float,
        max_clock_skew: float = 300.0,
        entropy: bytes,
    ) -> None:
        """`interval`: seconds between two ticks. `hold_seconds`: how long a manifest is offered. `entropy`: new at every
        start, so that no token is used twice."""
        secret = blake2b(
            identity.sign(b"rollwright swarm view\x00" + swarm.encode()), digest_size=32
        ).digest()
        self._identity = identity
        self._swarm = swarm
        self._mark = swarm_mark(swarm)
        self._interval = interval
        self._hold_seconds = hold_seconds
        self._max_clock_skew = max_clock_skew
        self._random = random.Random(blake2b(b"gossip", key=secret, salt=entropy[:16]).digest())
        self._token_key = blake2b(entropy, key=secret, digest_size=32).digest()
        self._tokens = 0
        self.view = PeerView(identity.peer, secret)
        self._records: dict[str, PeerRecord] = {}
        self._own_record: PeerRecord | None = None
        self._own: OrderedDict[bytes, None] = OrderedDict()
        self._held: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        """Manifests by id, with their times of arrival."""
        self._pending: OrderedDict[bytes, float] = OrderedDict()
        """Wanted ids, with the time when they may be wanted again."""
        self._open: OrderedDict[bytes, _Opened] = OrderedDict()
        """By token."""
        self._pulled: Counter[_Share] = Counter()
        """Manifests pulled in this interval."""
        self._carriers: OrderedDict[str, str] = OrderedDict()
        """Who last passed on a manifest of a peer, in an exchange that this node opened."""
        self._vouchers: OrderedDict[str, set[str]] = OrderedDict()
        """The makers of the groups by which a carrier earned its place. Those who work together can make good groups for each other to
        pass on; when such a maker is found to offer what it does not have, the places that rest on its groups alone are lost."""
        self._faults: OrderedDict[str, int] = OrderedDict()
        """Exchanges in a row in which a peer did not deliver."""
        self._answered: set[str] = set()
        """Peers whose offers were answered in this interval."""
        self._arrived: list[bytes] = []
        self.counts: Counter[str] = Counter()
        """Ignored input by `PassedOver`, until it is read."""
        self.work: Counter[str] = Counter()
        """Signatures checked and made since the start: nearly all of a node's cost."""

    def announce(self, envelope: bytes, now: float) -> None:
        """Offer an own manifest from now on."""
        name = manifest_id(envelope)
        self._own[name] = None
        if len(self._own) > OWN:
            self._own.popitem(last=False)
        self._hold(name, envelope, now)

    def prefer(self, peer: str, now: float) -> None:
        """A group of the peer was accepted: it and the carrier of its manifest have earned places in the view."""
        carrier = self._carriers.pop(peer, None)
        # Good groups do not make up for a fault: who does not deliver what it offers gets no place until it has done so.
        if peer not in self._faults:
            self.view.prefer(peer, now)
        if carrier is not None and carrier not in self._faults and peer not in self._faults:
            self.view.accept(carrier, now)
            self._vouchers.setdefault(carrier, set()).add(peer)
            if len(self._vouchers) > _FAULTY:
                self._vouchers.popitem(last=False)

    def meet(self, peers: Iterable[str], now: float) -> list[Outgoing]:
        """Open exchanges with peers that are known by name only; they count once they have answered."""
        return [
            self._offer(peer, now)
            for peer in peers
            if peer != self._identity.peer and not self.view.is_banished(peer, now)
        ]

    def tick(self, now: float) -> list[Outgoing]:
        """Begin an interval: give up overdue exchanges, open new ones."""
        self._pulled.clear()
        self._answered.clear()
        for token, opened in list(self._open.items()):
            if opened.ends <= now:
                del self._open[token]
                if not opened.answered:
                    self.view.note_silence(opened.peer, now)
                elif opened.wanted:
                    self._note_fault(opened.peer, now)
        while self._held and next(iter(self._held.values()))[1] < now - self._hold_seconds:
            self._held.popitem(last=False)
        if len(self._records) > MOST_KNOWN + 64:
            self._records = {peer: each for peer, each in self._records.items() if peer in self.view}
        return [self._offer(peer, now) for peer in self.view.draw(FANOUT)]

    def receive(self, data: bytes, now: float) -> list[Outgoing]:
        """Take a message; return the answers to it. Junk changes nothing and is counted."""
        try:
            message = read_message(data)
            if isinstance(message, GossipOffer):
                return self._on_offer(data, message, now)
            opened = self._open.get(message.token)
            if opened is None:
                self.counts[PassedOver.JUNK_GOSSIP] += 1
                return []
            if isinstance(message, OfferReply):
                self.work[CHECKED] += 1
                check_reply(data, opened.peer, self._identity.peer)
                return self._on_reply(opened, message, now)
            return self._on_delivery(opened, message, now)
        except PeerRefused:
            self.counts[PassedOver.JUNK_GOSSIP] += 1
            return []

    def take_arrived(self) -> list[bytes]:
        """The manifests that arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def _on_offer(self, data: bytes, offer: GossipOffer, now: float) -> list[Outgoing]:
        sender = offer.sender
        if (
            offer.swarm != self._mark
            or offer.receiver != self._identity.peer
            or sender == self._identity.peer
            or abs(offer.time - now) > self._max_clock_skew
        ):
            self.counts[PassedOver.JUNK_GOSSIP] += 1
            return []
        if self.view.is_banished(sender, now):
            return []
        # Counted before the signature is checked: a flood costs no more than its decoding. A member is always answered.
        if sender in self._answered or (len(self._answered) >= ANSWERED and sender not in self.view.members):
            self.counts[PassedOver.TOO_MUCH_GOSSIP] += 1
            return []
        self.work[CHECKED] += 1
        check_offer(data, offer)
        self._answered.add(sender)
        # Whoever opens many exchanges with others must not name more peers than those who are asked.
        if len(self._answered) <= LEARNT:
            self.view.add(sender, sender)
            self._learn(offer.records, sender, now)
        if offer.token in self._open:  # of another exchange: an honest node's token is new
            self.counts[PassedOver.JUNK_GOSSIP] += 1
            return []
        opened = self._new_exchange(offer.token, sender, now, answered=True)
        opened.wanted = self._choose(offer.manifests, opened, now)
        reply = OfferReply(offer.token, tuple(opened.wanted), tuple(opened.offered), self._tell(now))
        self.work[SIGNED] += 1
        return [Outgoing(sender, sign_reply(reply, sender, self._identity))]

    def _on_reply(self, opened: _Opened, reply: OfferReply, now: float) -> list[Outgoing]:
        if opened.answered:
            self.counts[PassedOver.JUNK_GOSSIP] += 1
            return []
        opened.answered = True
        self.view.note_answer(opened.peer, now)
        self._learn(reply.records, opened.peer, now)
        opened.wanted = self._choose(reply.manifests, opened, now)
        envelopes = self._envelopes(opened, reply.wanted)
        if not envelopes and not opened.wanted:
            return []
        delivery = Delivery(reply.token, envelopes, tuple(opened.wanted))
        return [Outgoing(opened.peer, encode_delivery(delivery))]

    def _on_delivery(self, opened: _Opened, delivery: Delivery, now: float) -> list[Outgoing]:
        genuine = bool(delivery.envelopes)
        for envelope in delivery.envelopes:
            name = manifest_id(envelope)
            if name not in opened.wanted:
                self.counts[PassedOver.JUNK_GOSSIP] += 1
                continue
            opened.wanted.discard(name)
            self.work[CHECKED] += 1
            try:
                manifest = open_signed(envelope)
            except PeerRefused:
                self.counts[PassedOver.JUNK_GOSSIP] += 1
                self._note_fault(opened.peer, now)
                genuine = False
                continue
            if manifest.swarm == self._swarm and name not in self._held:
                self._hold(name, envelope, now)
                self._arrived.append(envelope)
                if opened.opened_here and manifest.peer != opened.peer:
                    self._carriers[manifest.peer] = opened.peer
                    if len(self._carriers) > HELD:
                        self._carriers.popitem(last=False)
                # Its signature shows that the peer was there: another name from another part of the swarm.
                if self.view.believes(opened.peer) and self.view.is_wanted(
                    manifest.peer, opened.peer, manifest.created
                ):
                    self.view.add(manifest.peer, opened.peer)
        if genuine and not opened.wanted:
            self._faults.pop(opened.peer, None)
        envelopes = self._envelopes(opened, delivery.wanted)
        return (
            [Outgoing(opened.peer, encode_delivery(Delivery(delivery.token, envelopes)))] if envelopes else []
        )

    def _offer(self, peer: str, now: float) -> Outgoing:
        self._tokens += 1
        token = blake2b(
            self._tokens.to_bytes(8, "big"), key=self._token_key, digest_size=TOKEN_BYTES
        ).digest()
        opened = self._new_exchange(token, peer, now, answered=False)
        offer = GossipOffer(
            self._mark, self._identity.peer, peer, now, token, tuple(opened.offered), self._tell(now)
        )
        self.work[SIGNED] += 1
        return Outgoing(peer, sign_offer(offer, self._identity))

    def _new_exchange(self, token: bytes, peer: str, now: float, *, answered: bool) -> _Opened:
        opened = _Opened(
            peer,
            now + ANSWER_INTERVALS * self._interval,
            answered,
            frozenset(self._to_offer()),
            opened_here=not answered,
        )
        self._open[token] = opened
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return opened

    def _to_offer(self) -> list[bytes]:
        """Own manifests, then others of the newest, by lot."""
        own = [each for each in self._own if each in self._held]
        fresh = [each for each in list(self._held)[-OFFERED_FRESH:] if each not in self._own]
        return own + self._random.sample(fresh, min(OFFERED - len(own), len(fresh)))

    def _choose(self, offered: Sequence[bytes], opened: _Opened, now: float) -> set[bytes]:
        """Which of the offered manifests to pull, by lot."""
        share = self._share_of(opened)
        unknown = [
            each
            for each in dict.fromkeys(offered)
            if each not in self._held and self._pending.get(each, 0.0) <= now
        ]
        room = min(share.from_one, share.in_all - self._pulled[share], len(unknown))
        chosen = self._random.sample(unknown, max(room, 0))
        self._pulled[share] += len(chosen)
        for each in chosen:
            self._pending[each] = now + ANSWER_INTERVALS * self._interval
            self._pending.move_to_end(each)
            if len(self._pending) > _PENDING:
                self._pending.popitem(last=False)
        return set(chosen)

    def _share_of(self, opened: _Opened) -> "_Share":
        if opened.opened_here:
            return _CHOSEN
        return _MEMBERS if opened.peer in self.view.members else _STRANGERS

    def _envelopes(self, opened: _Opened, wanted: Sequence[bytes]) -> tuple[bytes, ...]:
        """The wanted manifests of those that were offered in this exchange."""
        names = [each for each in dict.fromkeys(wanted) if each in opened.offered and each in self._held][
            :DELIVERED
        ]
        opened.offered -= frozenset(names)  # each is delivered once
        return tuple(self._held[each][0] for each in names)

    def _note_fault(self, peer: str, now: float) -> None:
        self._faults[peer] = self._faults.pop(peer, 0) + 1
        for carrier, makers in list(self._vouchers.items()):
            makers.discard(peer)
            if not makers:
                del self._vouchers[carrier]
                self.view.withdraw(carrier)
        if self._faults[peer] >= FAULTS:
            del self._faults[peer]
            self.view.banish(peer, now)
            return
        self.view.demote(peer, now)
        if len(self._faults) > _FAULTY:
            self._faults.popitem(last=False)

    def _hold(self, name: bytes, envelope: bytes, now: float) -> None:
        self._pending.pop(name, None)
        self._held[name] = (envelope, now)
        if len(self._held) > HELD:
            self._held.popitem(last=False)

    def _tell(self, now: float) -> tuple[bytes, ...]:
        """Records to pass on: the own one, and those of some members."""
        if self._own_record is None or now - self._own_record.time > RENEW_SECONDS:
            self._own_record = sign_record(self._identity, self._mark, now)
        records = [self._records.get(peer) for peer in self.view.sample(RECORDS)]
        known = [each.packed for each in records if each is not None and self._is_recent(each, now)]
        self._random.shuffle(known)
        return (self._own_record.packed, *known[: RECORDS - 1])

    def _learn(self, packed: Sequence[bytes], source: str, now: float) -> None:
        """Take records of peers; a signature is checked only if the record is of use."""
        for each in packed:
            record = read_record(each)
            if not self._is_recent(record, now):
                continue
            if record.peer == source:
                known = self._records.get(source)
                if known is None or record.time > known.time:
                    self._keep(record)
            elif (
                self.view.believes(source)
                and self.view.is_wanted(record.peer, source, record.time)
                and self._keep(record)
            ):
                self.view.add(record.peer, source)

    def _keep(self, record: PeerRecord) -> bool:
        self.work[CHECKED] += 1
        if not is_genuine(record, self._mark):
            self.counts[PassedOver.JUNK_GOSSIP] += 1
            return False
        self._records[record.peer] = record
        return True

    def _is_recent(self, record: PeerRecord, now: float) -> bool:
        return -self._max_clock_skew <= now - record.time <= RECORD_SECONDS
