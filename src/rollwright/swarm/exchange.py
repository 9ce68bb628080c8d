"""One node's exchange with its swarm, as stages: publish own groups, listen to manifests, gather foreign groups.

Invariants:
- Nothing of a peer reaches the trainer that did not pass, in this order, admission (signature, swarm, sequence, round,
  clock, quota), selection, the digest, the schema, the duplicate check and the replay.
- A peer's misbehaviour ends at most the one group, is counted under one reason, and puts the peer into quarantine when no
  honest node would have signed it, with the peer's own signed bytes as evidence.
- Without peers, or with an unreachable network, every stage returns in time, with nothing.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from rollwright.errors import FormatError, RollwrightError
from rollwright.swarm import content
from rollwright.swarm.admission import Admission, Candidates
from rollwright.swarm.duplicates import SeenGroups
from rollwright.swarm.gathering import Gathering, GroupCheck
from rollwright.swarm.identity import SEQUENCE_FILE, Identity, SequenceFile
from rollwright.swarm.publishing import Publisher
from rollwright.swarm.quarantine import Quarantine
from rollwright.swarm.recipes import TaskBook
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.reputation import Reputation
from rollwright.swarm.selection import in_turns
from rollwright.swarm.settings import SwarmConfig
from rollwright.swarm.signed import MAX_GROUP, Manifest
from rollwright.swarm.transports.base import FetchFailed, FetchProblem, Peer, Transport
from rollwright.swarm.verification import Scorer, Verified, check_claims, verify
from rollwright.trajectory import Trajectory

ACCEPTED, MISSED = "accepted", "missed"
"""Counters beside the reasons of `PeerRefusal`: foreign groups accepted, and manifests lost because they came too fast."""

SEEN_FILE = "seen"
QUARANTINE_FOLDER = "quarantine"

_ADMITTED_AT_ONCE = 64
"""Manifests admitted before the event loop may do other work: checking a signature takes a tenth of a millisecond."""

_log = logging.getLogger(__name__)


class ForeignGroup(msgspec.Struct, frozen=True):
    """A peer's group that passed every check: its trajectories train like own ones."""

    peer: str
    digest: str
    round: int
    """The peer's round when it played the group."""
    trajectories: list[Trajectory]
    off_policy: bool
    """Whether its token ids were made here, because the peer has another tokenizer."""


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    """State that outlives a restart, so that no group is trained on twice."""

    gate: bytes
    groups: list[tuple[str, tuple[str, str, int]]]


Verifier = Callable[[content.SharedGroup, str, TaskBook, Scorer, float], Awaitable[Verified]]
"""The signature of `verification.verify`."""


class ManifestListener:
    """The stage that admits announced manifests as candidates."""

    def __init__(
        self,
        transport: Transport,
        admission: Admission,
        candidates: Candidates,
        book: TaskBook,
        reputation: Reputation,
        *,
        settings: SwarmConfig,
        max_group_size: int,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._admission = admission
        self._candidates = candidates
        self._book = book
        self._reputation = reputation
        self._settings = settings
        self._max_group_size = max_group_size
        self._counts = counts
        self._clock = clock
        self._cursor = 0

    async def listen(self, round: int) -> None:
        """Read all manifests that arrived since the last call."""
        try:
            announced = await self._transport.manifests(self._cursor)
        except RollwrightError as error:
            _log.warning("round %d: no manifests were read: %s", round, error)
            return
        self._cursor = announced.cursor
        if announced.missed:
            self._counts[MISSED] += announced.missed
        self._counts.update(announced.passed_over)
        for number, envelope in enumerate(announced.manifests, 1):
            if number % _ADMITTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                self._admit(envelope, round)
            except PeerRefused as refused:
                self._counts[str(refused.reason)] += 1
                if refused.reason is PeerRefusal.EQUIVOCATION:
                    self._reputation.judge_announcement(envelope, refused)

    def _admit(self, envelope: bytes, round: int) -> None:
        manifest = self._admission.admit(envelope, round=round, now=self._clock())
        size, members = manifest.size, len(manifest.rewards)
        if size > self._settings.max_group_kb << 10 or members > self._max_group_size:
            raise PeerRefused(PeerRefusal.TOO_LARGE, f"{members} members, {size} bytes of content")
        self._book.check(manifest.env, manifest.env_version)
        self._candidates.add(manifest, envelope)


@dataclass(frozen=True)
class GroupChecker:
    """The stage that fetches and verifies one group; a `gathering.Checker`."""

    swarm: str
    transport: Transport
    book: TaskBook
    seen: SeenGroups
    scorer: Scorer
    settings: SwarmConfig
    verifier: Verifier = verify

    async def check(self, check: GroupCheck) -> None:
        await self._fetch(check)
        await self.verify(check)

    async def _fetch(self, check: GroupCheck) -> None:
        manifest = check.manifest
        try:
            check.data = await self.transport.fetch(
                manifest.peer, manifest.digest, manifest.size, self.settings.communication.fetch_timeout
            )
        except FetchFailed as failed:
            check.timed_out = failed.problem is FetchProblem.DEADLINE
            raise PeerRefused(PeerRefusal.NOT_FETCHED, str(failed)) from failed
        if len(check.data) != manifest.size:
            raise PeerRefused(PeerRefusal.CONTENT_DIFFERS, f"{len(check.data)} bytes, not {manifest.size}")

    async def verify(self, check: GroupCheck) -> None:
        """Check content that was fetched: the cheap tests first, the replay last."""
        manifest = check.manifest
        check.group = content.decode(check.data)
        check_claims(check.group, manifest, self.swarm)
        self.seen.check(manifest.digest, check.group)
        verified = await self.verifier(
            check.group, manifest.digest, self.book, self.scorer, self.settings.communication.verify_timeout
        )
        self._check_likely(verified)
        check.verified = verified

    def _check_likely(self, verified: Verified) -> None:
        least = self.settings.min_mean_logprob
        if least is None:
            return
        for trajectory in verified.trajectories:
            logprobs = [each for turn in trajectory.turns for each in turn.logprobs]
            if logprobs and sum(logprobs) / len(logprobs) < least:
                raise PeerRefused(
                    PeerRefusal.UNLIKELY, f"{trajectory.rollout_id}: mean log-probability below {least:g}"
                )


class Exchange:
    """The stages of one node, with the state that they share."""

    def __init__(
        self,
        identity: Identity,
        swarm: str,
        transport: Transport,
        book: TaskBook,
        folder: Path,
        *,
        settings: SwarmConfig | None = None,
        max_group_size: int = MAX_GROUP,
        verifier: Verifier = verify,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder` keeps the state that outlives a restart: the sequence, the seen groups, the quarantine. `verifier`
        lets a benchmark show what happens without verification. `max_group_size`: members of a foreign group; a group larger
        than own ones would weigh more than they do."""
        self.counts: Counter[str] = Counter()
        self.quarantine = Quarantine(folder / QUARANTINE_FOLDER)
        self._identity = identity
        self._swarm = swarm
        self._transport = transport
        self._book = book
        self._settings = settings or SwarmConfig()
        self._communication = self._settings.communication
        self._verifier = verifier
        self._sequence = SequenceFile(folder / SEQUENCE_FILE)
        self._seen_file = folder / SEEN_FILE
        self._seen = SeenGroups()
        self._candidates = Candidates()
        self.admission = Admission(swarm, identity.peer, self._settings, self.quarantine.__contains__)
        self._reputation = Reputation(self.quarantine, self._seen, self._candidates, clock)
        self.publisher = Publisher(
            identity,
            swarm,
            transport,
            book,
            sequence=self._sequence,
            seen=self._seen,
            counts=self.counts,
            clock=clock,
        )
        self._listener = ManifestListener(
            transport,
            self.admission,
            self._candidates,
            book,
            self._reputation,
            settings=self._settings,
            max_group_size=max_group_size,
            counts=self.counts,
            clock=clock,
        )
        self._secret = int.from_bytes(
            sha256(identity.sign(b"rollwright swarm selection\x00")).digest()[:8], "big"
        )
        """The key of the draw: the same after a restart, and known to no other node."""
        if self._seen_file.exists():
            self.restore(self._seen_file.read_bytes())

    async def share(
        self, round: int, index: int, tag: str, trajectories: Sequence[Trajectory], tokenizer: str
    ) -> str | None:
        """Publish an own group; see `Publisher.publish`."""
        return await self.publisher.publish(round, index, tag, trajectories, tokenizer)

    async def listen(self, round: int) -> None:
        """Admit new manifests; see `ManifestListener.listen`."""
        await self._listener.listen(round)

    async def gather(self, round: int, count: int, scorer: Scorer) -> list[ForeignGroup]:
        """Take up to `count` foreign groups for this round, by the rule of `selection`."""
        gathering: Gathering | None = None
        try:
            async with asyncio.timeout(self._communication.gather_timeout) as limit:
                await self._listener.listen(round)
                gathering = self._new_gathering(round, count, scorer)
                await gathering.run()
        except TimeoutError:
            if not limit.expired():
                raise
        taken = [] if gathering is None else self._take(gathering)
        if limit.expired():
            _log.warning("round %d: gathering took too long; going on with %d groups", round, len(taken))
        self._save()
        return sorted(taken, key=lambda each: (each.peer, each.digest))

    def checker(self, scorer: Scorer) -> GroupChecker:
        """The stage that checks single groups with this node's policy."""
        return GroupChecker(
            self._swarm, self._transport, self._book, self._seen, scorer, self._settings, self._verifier
        )

    def peers(self) -> Sequence[Peer]:
        return self._transport.peers()

    def rounds(self) -> dict[str, int]:
        """The last round that each peer announced."""
        return self.admission.rounds()

    def sequences(self) -> dict[str, int]:
        """The highest sequence number of each peer; it grows with every announcement."""
        return self.admission.sequences()

    def snapshot(self) -> bytes:
        """The manifests and groups seen so far; saved in the folder after every round."""
        return msgspec.msgpack.encode(_Memory(self.admission.snapshot(), self._seen.snapshot()))

    def restore(self, data: bytes) -> None:
        try:
            memory = msgspec.msgpack.decode(data, type=_Memory)
        except msgspec.MsgspecError as error:
            raise FormatError(f"{self._seen_file}: not what a node has seen: {error}; remove it") from error
        self.admission.restore(memory.gate)
        self._seen.restore(memory.groups)
        for peer in self._seen.peers() - {self._identity.peer}:
            self._transport.prefer(peer)

    async def close(self) -> None:
        self._save()
        self._sequence.close()
        await self._transport.close()

    def _new_gathering(self, round: int, count: int, scorer: Scorer) -> Gathering:
        fresh = self._candidates.fresh(lambda each: self.admission.is_fresh(each, round))
        proven, silent = self._reputation.begin_gathering()
        return Gathering(
            in_turns(fresh, (self._secret, round), proven=proven, silent=silent),
            count,
            per_peer=self._settings.per_peer,
            beam_size=self._communication.beam_size,
            seen=self._seen,
            checker=self.checker(scorer),
            peers=self._reputation,
        )

    def _take(self, gathering: Gathering) -> list[ForeignGroup]:
        """Account for the results: accepted and refused groups are no candidates any more."""
        accepted, refused = gathering.results()
        for check, why in refused:
            self.counts[str(why.reason)] += 1
            self._candidates.take(check.manifest)
            if why.reason is PeerRefusal.NOT_FETCHED:
                self._reputation.note_silence(check.manifest.peer)
        for check in accepted:
            assert check.group is not None, "it was verified"
            self.counts[ACCEPTED] += 1
            self._candidates.take(check.manifest)
            self._seen.add(check.manifest.digest, check.group)
            self._transport.prefer(check.manifest.peer)
            self._reputation.note_answer(check.manifest.peer)
        return [_foreign_group(check.manifest, check.verified) for check in accepted]

    def _save(self) -> None:
        partial = self._seen_file.with_name(f"{SEEN_FILE}.partial")
        partial.write_bytes(self.snapshot())
        partial.replace(self._seen_file)


def _foreign_group(manifest: Manifest, verified: Verified | None) -> ForeignGroup:
    assert verified is not None, "only verified groups are accepted"
    return ForeignGroup(
        manifest.peer, manifest.digest, manifest.round, verified.trajectories, verified.off_policy
    )
