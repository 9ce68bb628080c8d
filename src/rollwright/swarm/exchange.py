"""One node's dealings with its swarm: shares own groups, and gathers foreign ones that hold up.

True of it: nothing of a peer reaches the trainer that did not pass, in this order, the gate (signature, swarm, sequence,
round, clock, quota), the choice, the digest, the schema, the duplicate check and the replay; whatever a peer does ends at
most that one group, is counted under one reason, and what no honest node signs puts the peer into quarantine with its own
signed bytes as evidence. Without peers, or with an unreachable network, both calls return in time, with nothing.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from rollwright.errors import FormatError, RollwrightError
from rollwright.swarm import content, envelope
from rollwright.swarm.duplicates import SeenGroups
from rollwright.swarm.gathering import Gathering, Look
from rollwright.swarm.identity import SEQUENCE_FILE, Identity, SequenceFile, short_name
from rollwright.swarm.manifests import Candidates, Gate
from rollwright.swarm.quarantine import Quarantine
from rollwright.swarm.recipes import TaskBook, task_digest, task_seed
from rollwright.swarm.refusals import Refusal, Refused
from rollwright.swarm.selection import in_turns, is_flat
from rollwright.swarm.settings import SwarmConfig
from rollwright.swarm.transport import FetchFailed, FetchProblem, Peer, Transport, digest_of
from rollwright.swarm.verification import (
    SCORER_KILLED,
    Scorer,
    Verified,
    check_claims,
    verify,
)
from rollwright.trajectory import Trajectory

ACCEPTED, SHARED, NOT_SHARED, MISSED = "accepted", "shared", "not_shared", "missed"
"""Counters beside the reasons of `Refusal`: groups taken, groups announced, groups that could not be, manifests that
came too fast to be read."""

SEEN_FILE = "seen"
QUARANTINE_FOLDER = "quarantine"

SILENT_FOR = 3
"""Gatherings in which a peer whose content did not come stands behind the others."""

_MAX_SILENT = 4096
_ADMITTED_AT_ONCE = 64
"""Manifests between two looks at other work: checking a signature takes a tenth of a millisecond."""

_log = logging.getLogger(__name__)


class ForeignGroup(msgspec.Struct, frozen=True):
    """A peer's group that held up: its trajectories train like own ones."""

    peer: str
    digest: str
    round: int
    """Of the peer, when it made the group."""
    trajectories: list[Trajectory]
    off_policy: bool
    """Whether its token ids were made here, because the peer has another tokenizer."""


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    """What must outlive a restart, so that nothing is trained on twice."""

    gate: bytes
    groups: list[tuple[str, tuple[str, str, int]]]


Verifier = Callable[[content.SharedGroup, str, TaskBook, Scorer, float], Awaitable[Verified]]
"""As `verification.verify`."""


class Exchange:
    def __init__(
        self,
        identity: Identity,
        swarm: str,
        transport: Transport,
        book: TaskBook,
        folder: Path,
        *,
        settings: SwarmConfig | None = None,
        max_group_size: int = envelope.MAX_GROUP,
        verifier: Verifier = verify,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder` keeps what must outlive a restart: the sequence, what was seen, the quarantine. `max_group_size`: members
        of a foreign group, because one that is larger than own ones would weigh more than they do. `verifier` is there for
        benchmarks that show what happens without one."""
        self.counts: Counter[str] = Counter()
        self.quarantine = Quarantine(folder / QUARANTINE_FOLDER)
        self._identity = identity
        self._swarm = swarm
        self._transport = transport
        self._book = book
        self._settings = settings or SwarmConfig()
        self._communication = self._settings.communication
        self._max_group_size = max_group_size
        self._verifier = verifier
        self._clock = clock
        self._sequence = SequenceFile(folder / SEQUENCE_FILE)
        self._seen_file = folder / SEEN_FILE
        self._gate = Gate(swarm, identity.peer, self._settings, self.quarantine.__contains__)
        self._candidates = Candidates()
        self._groups = SeenGroups()
        self._gatherings = 0
        self._silent: OrderedDict[str, int] = OrderedDict()
        """Peers whose content did not come, and in which gathering that was."""
        self._cursor = 0
        self._secret = int.from_bytes(
            sha256(identity.sign(b"rollwright swarm selection\x00")).digest()[:8], "big"
        )
        """What the draw is keyed by; the same after a restart, and known to nobody else."""
        if self._seen_file.exists():
            self.restore(self._seen_file.read_bytes())

    async def share(
        self, round: int, index: int, tag: str, trajectories: Sequence[Trajectory], tokenizer: str
    ) -> str | None:
        """Announces an own group, the `index`-th of this node's stream; its digest, or `None` when there is nothing to
        learn from it, or it cannot be shared (counted)."""
        if is_flat([each.reward for each in trajectories]):
            return None
        try:
            if any(each.metrics.get(SCORER_KILLED) for each in trajectories):
                raise RollwrightError("a scorer was stopped: another machine may find another reward")
            group = self._shared(index, tag, trajectories, tokenizer)
            data = content.encode(group)
            content.decode(data)  # what no peer would take is not announced
            manifest = self._manifest(round, group, data)
            self._groups.add(manifest.digest, group)
            await self._transport.publish(manifest.digest, data)
            await self._transport.announce(envelope.seal(manifest, self._identity))
        except RollwrightError as error:
            self.counts[NOT_SHARED] += 1
            _log.warning("group %d of round %d was not shared: %s", index, round, error)
            return None
        self.counts[SHARED] += 1
        return manifest.digest

    async def gather(self, round: int, count: int, scorer: Scorer) -> list[ForeignGroup]:
        """Up to `count` foreign groups for this round, by the rule of `selection`; fewer when there are no more."""
        gathering: Gathering | None = None
        try:
            async with asyncio.timeout(self._communication.gather_timeout) as limit:
                await self.listen(round)
                gathering = self._gathering(round, count, scorer)
                await gathering.run()
        except TimeoutError:
            if not limit.expired():
                raise
        taken = [] if gathering is None else self._take(gathering)
        if limit.expired():
            _log.warning("round %d: gathering took too long; going on with %d groups", round, len(taken))
        self._keep()
        return sorted(taken, key=lambda each: (each.peer, each.digest))

    async def listen(self, round: int) -> None:
        """Lets in what was announced; `gather` does so too."""
        try:
            announced = await self._transport.manifests(self._cursor)
        except RollwrightError as error:
            _log.warning("round %d: nothing heard: %s", round, error)
            return
        self._cursor = announced.cursor
        if announced.missed:
            self.counts[MISSED] += announced.missed
        self.counts.update(announced.passed_over)
        for number, data in enumerate(announced.manifests, 1):
            if number % _ADMITTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                manifest = self._gate.admit(data, round=round, now=self._clock())
                self._check_size(manifest)
                self._book.check(manifest.env, manifest.env_version)
                self._candidates.add(manifest, data)
            except Refused as refused:
                self._refuse(refused, data)

    def peers(self) -> Sequence[Peer]:
        return self._transport.peers()

    def rounds(self) -> dict[str, int]:
        """The last round that each peer told of."""
        return self._gate.rounds()

    def sequences(self) -> dict[str, int]:
        """The highest sequence number of each peer; it moves with everything that a peer announces."""
        return self._gate.sequences()

    def snapshot(self) -> bytes:
        """What was seen already; kept in the folder after every round."""
        return msgspec.msgpack.encode(_Memory(self._gate.snapshot(), self._groups.snapshot()))

    def restore(self, data: bytes) -> None:
        try:
            memory = msgspec.msgpack.decode(data, type=_Memory)
        except msgspec.MsgspecError as error:
            raise FormatError(f"{self._seen_file}: not what a node has seen: {error}; remove it") from error
        self._gate.restore(memory.gate)
        self._groups.restore(memory.groups)
        for peer in self._groups.peers() - {self._identity.peer}:
            self._transport.prefer(peer)

    async def close(self) -> None:
        self._keep()
        self._sequence.close()
        await self._transport.close()

    def _shared(
        self, index: int, tag: str, trajectories: Sequence[Trajectory], tokenizer: str
    ) -> content.SharedGroup:
        recipe = content.Recipe(
            env=tag,
            env_version=self._book.version(tag),
            seed=task_seed(self._swarm, self._identity.peer),
            index=index,
            task=task_digest(trajectories[0].observation),
        )
        members = tuple(content.shared_member(each) for each in trajectories)
        return content.SharedGroup(envelope.PROTOCOL, self._identity.peer, recipe, tokenizer, members)

    def _manifest(self, round: int, group: content.SharedGroup, data: bytes) -> envelope.Manifest:
        return envelope.Manifest(
            swarm=self._swarm,
            peer=self._identity.peer,
            round=round,
            sequence=self._sequence.next(),
            created=self._clock(),
            env=group.recipe.env,
            env_version=group.recipe.env_version,
            index=group.recipe.index,
            digest=digest_of(data),
            size=len(data),
            rewards=group.rewards,
        )

    def _check_size(self, manifest: envelope.Manifest) -> None:
        size, members = manifest.size, len(manifest.rewards)
        if size > self._settings.max_group_kb << 10 or members > self._max_group_size:
            raise Refused(Refusal.TOO_LARGE, f"{members} members, {size} bytes of content")

    def _gathering(self, round: int, count: int, scorer: Scorer) -> Gathering:
        """The search of a round, which has looked at nothing yet."""

        async def look(at: Look) -> None:
            await self._look(at, scorer)

        fresh = self._candidates.fresh(lambda each: self._gate.is_fresh(each, round))
        proven = self._groups.peers()
        self._gatherings += 1
        silent = {peer for peer, when in self._silent.items() if self._gatherings - when <= SILENT_FOR}
        return Gathering(
            in_turns(fresh, (self._secret, round), proven=proven, silent=silent),
            count,
            per_peer=self._settings.per_peer,
            beam_size=self._communication.beam_size,
            seen=self._groups,
            is_caught=self.quarantine.__contains__,
            look=look,
            judge=self._judge,
            is_proven=proven.__contains__,
        )

    async def _look(self, look: Look, scorer: Scorer) -> None:
        """Fetches and verifies a group; raises `Refused`."""
        await self._fetch(look)
        await self._verify(look, scorer)

    async def _fetch(self, look: Look) -> None:
        manifest = look.manifest
        try:
            look.data = await self._transport.fetch(
                manifest.peer, manifest.digest, manifest.size, self._communication.fetch_timeout
            )
        except FetchFailed as failed:
            look.unanswered = failed.problem is FetchProblem.DEADLINE
            raise Refused(Refusal.NOT_FETCHED, str(failed)) from failed
        if len(look.data) != manifest.size:
            raise Refused(Refusal.CONTENT_DIFFERS, f"{len(look.data)} bytes, not {manifest.size}")

    async def _verify(self, look: Look, scorer: Scorer) -> None:
        manifest = look.manifest
        look.group = content.decode(look.data)
        check_claims(look.group, manifest, self._swarm)
        self._groups.check(manifest.digest, look.group)  # before it is played again, which takes longer
        verified = await self._verifier(
            look.group, manifest.digest, self._book, scorer, self._communication.verify_timeout
        )
        self._check_likely(verified)
        look.verified = verified

    def _check_likely(self, verified: Verified) -> None:
        least = self._settings.min_mean_logprob
        if least is None:
            return
        for trajectory in verified.trajectories:
            logprobs = [each for turn in trajectory.turns for each in turn.logprobs]
            if logprobs and sum(logprobs) / len(logprobs) < least:
                raise Refused(
                    Refusal.UNLIKELY, f"{trajectory.rollout_id}: mean log-probability below {least:g}"
                )

    def _take(self, gathering: Gathering) -> list[ForeignGroup]:
        """Those that have a place; they, and all that are refused, are not looked at again."""
        taken, refused = gathering.results()
        for look, reason in refused:
            self.counts[str(reason.reason)] += 1
            self._candidates.take(look.manifest)
            if reason.reason is Refusal.NOT_FETCHED:
                self._note_silent(look.manifest.peer)
        for look in taken:
            assert look.group is not None, "it was verified"
            self.counts[ACCEPTED] += 1
            self._candidates.take(look.manifest)
            self._groups.add(look.manifest.digest, look.group)
            self._transport.prefer(look.manifest.peer)
            self._silent.pop(look.manifest.peer, None)
        return [_foreign(look) for look in taken]

    def _note_silent(self, peer: str) -> None:
        self._silent[peer] = self._gatherings
        self._silent.move_to_end(peer)
        if len(self._silent) > _MAX_SILENT:
            self._silent.popitem(last=False)

    def _judge(self, look: Look) -> None:
        """What a group says about its peer."""
        if look.refused is None:
            self.quarantine.trust_again(look.manifest.peer)
        else:
            self._blame(look.manifest.peer, look.refused, self._candidates.envelope(look.manifest), look.data)

    def _refuse(self, refused: Refused, signed: bytes) -> None:
        """At the gate."""
        self.counts[str(refused.reason)] += 1
        if refused.reason is Refusal.EQUIVOCATION:
            self._blame(envelope.unseal(signed).peer, refused, signed)

    def _blame(self, peer: str, refused: Refused, signed: bytes, data: bytes = b"") -> None:
        if peer in self.quarantine:
            return
        if self.quarantine.judge(peer, refused, now=self._clock(), manifest=signed, content=data):
            _log.warning("peer %s (%s) is in quarantine: %s", short_name(peer), peer[:16], refused)

    def _keep(self) -> None:
        partial = self._seen_file.with_name(f"{SEEN_FILE}.partial")
        partial.write_bytes(self.snapshot())
        partial.replace(self._seen_file)


def _foreign(look: Look) -> ForeignGroup:
    manifest, verified = look.manifest, look.verified
    assert verified is not None, "it has a place"
    return ForeignGroup(
        manifest.peer, manifest.digest, manifest.round, verified.trajectories, verified.off_policy
    )
