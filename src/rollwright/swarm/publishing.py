"""Publish own groups: content that peers can fetch, and a signed manifest to all peers.

Invariant: a group is announced only if an honest peer would accept it. Groups with equal rewards, groups that cannot be
replayed from their actions, and groups whose scorer was killed stay here.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from rollwright.errors import RollwrightError
from rollwright.swarm import content
from rollwright.swarm.duplicates import SeenGroups
from rollwright.swarm.identity import Identity, SequenceFile
from rollwright.swarm.recipes import TaskBook, task_digest, task_seed
from rollwright.swarm.selection import is_flat
from rollwright.swarm.signed import PROTOCOL, Manifest, sign_manifest
from rollwright.swarm.transports.base import Transport, digest_of
from rollwright.swarm.verification import SCORER_KILLED
from rollwright.trajectory import Trajectory

SHARED, NOT_SHARED = "shared", "not_shared"
"""Counters: own groups announced, and own groups that could not be."""

_log = logging.getLogger(__name__)


class Publisher:
    def __init__(
        self,
        identity: Identity,
        swarm: str,
        transport: Transport,
        book: TaskBook,
        *,
        sequence: SequenceFile,
        seen: SeenGroups,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        """`seen` remembers own groups too, so that copies of them are refused. `counts` is the exchange's."""
        self._identity = identity
        self._swarm = swarm
        self._transport = transport
        self._book = book
        self._sequence = sequence
        self._seen = seen
        self._counts = counts
        self._clock = clock

    async def publish(
        self, round: int, index: int, tag: str, trajectories: Sequence[Trajectory], tokenizer: str
    ) -> str | None:
        """Announce an own group, number `index` of this node's stream, and return its digest. `None`: all rewards are
        equal, so nothing can be learnt from it, or it cannot be shared (counted)."""
        if is_flat([each.reward for each in trajectories]):
            return None
        if tag in self._book.unverifiable:  # said when the node starts
            self._counts[NOT_SHARED] += 1
            return None
        try:
            if any(each.metrics.get(SCORER_KILLED) for each in trajectories):
                raise RollwrightError("a scorer was killed: another machine may compute another reward")
            group = self._shared_group(index, tag, trajectories, tokenizer)
            data = content.encode(group)
            content.decode(data)  # raises for a group that breaks the limits that peers enforce
            manifest = self.manifest(round, group, data)
            self._seen.add(manifest.digest, group)
            await self._transport.publish(manifest.digest, data)
            await self._transport.announce(sign_manifest(manifest, self._identity))
        except RollwrightError as error:
            self._counts[NOT_SHARED] += 1
            _log.warning("group %d of round %d was not shared: %s", index, round, error)
            return None
        self._counts[SHARED] += 1
        return manifest.digest

    def manifest(self, round: int, group: content.SharedGroup, data: bytes) -> Manifest:
        """A manifest of the group, with the next sequence number."""
        return Manifest(
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

    def _shared_group(
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
        return content.SharedGroup(PROTOCOL, self._identity.peer, recipe, tokenizer, members)
