"""Gather foreign groups for one round: check several at a time, and decide in the order of the draw.

Invariants:
- The result follows from the order of the draw and from each group's verdict, never from who answers first: a group that
  is still being checked keeps its place, and duplicates and caught peers are decided in the order of the draw.
- A peer of which nothing is taken changes nothing for the others: a refused group, or a group of a peer that is caught
  meanwhile, gives its place to the next one in the order.
- A group is checked only while fewer than `count` groups before it may still be taken, so no check is wasted.
- A peer that does not answer is asked once: a second group is fetched only after the first has arrived, and none in this
  round if the first one timed out.
- Strangers that announce groups which they do not deliver cost a round a bounded time: beyond `PATIENCE` no further
  stranger has a place in it.

Algorithm: `_standing` assigns the `count` places, optimistically: a group without a verdict counts as good. `_start`
begins checks for groups that have a place. When a check ends, `_settle` judges peers up to the first undecided place,
which may free places, and the loop starts again with a new assignment.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollwright.swarm.content import SharedGroup
from rollwright.swarm.duplicates import SeenGroups
from rollwright.swarm.refusals import BLAMED, PeerRefusal, PeerRefused
from rollwright.swarm.selection import places
from rollwright.swarm.signed import Manifest
from rollwright.swarm.verification import Verified

PATIENCE = 64
"""Failed fetches of strangers (peers of which no group has been accepted yet) that one round tolerates. Groups that are
announced behind them can be taken in a later round."""

TIMEOUT_WEIGHT = 8
"""Failed fetches that a stranger's timeout counts for: eight timeouts exhaust `PATIENCE` and cost a round twenty seconds,
with four fetches at a time and ten seconds for each."""


@dataclass
class GroupCheck:
    """State and result of checking one group."""

    manifest: Manifest
    data: bytes = b""
    """The content, once it has arrived."""
    group: SharedGroup | None = None
    """The decoded content."""
    verified: Verified | None = None
    """Set when the group passed every check."""
    refused: PeerRefused | None = None
    """Set when it did not."""
    timed_out: bool = False
    """Whether the peer let the deadline for its content pass."""
    judged: bool = False
    """Whether the peer's reputation accounts for this result."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    """Set while the check runs."""

    @property
    def is_done(self) -> bool:
        return self.verified is not None or self.refused is not None

    @property
    def is_not_fetched(self) -> bool:
        return self.refused is not None and self.refused.reason is PeerRefusal.NOT_FETCHED


class Checker(Protocol):
    """The stage that fetches and verifies one group."""

    async def check(self, check: GroupCheck) -> None:
        """Fill in all that is found out; raise `PeerRefused` for a group that does not pass."""
        ...


class PeerJudge(Protocol):
    """What is known of peers, and what follows from a finished check."""

    def is_caught(self, peer: str) -> bool:
        """Whether the peer is in quarantine."""
        ...

    def is_proven(self, peer: str) -> bool:
        """Whether a group of the peer was accepted in an earlier round."""
        ...

    def judge(self, check: GroupCheck) -> None:
        """Update the peer's reputation from a finished check."""
        ...


class Gathering:
    """The search of one round."""

    def __init__(
        self,
        order: Sequence[Manifest],
        count: int,
        *,
        per_peer: int | None,
        beam_size: int,
        seen: SeenGroups,
        checker: Checker,
        peers: PeerJudge,
    ) -> None:
        """`order`: the candidates as drawn. `seen`: groups of earlier rounds; the gathering does not change it.
        `beam_size`: checks that run concurrently."""
        self._order = order
        self._seen = seen
        self._count = count
        self._per_peer = per_peer
        self._beam_size = beam_size
        self._checker = checker
        self._peers = peers
        self._checks: dict[tuple[str, str], GroupCheck] = {}

    async def run(self) -> None:
        """Run until `count` groups are found or no candidate is left. May be cancelled at any time: `results` then has
        what was found so far."""
        try:
            while True:
                self._start()
                running = [each.task for each in self._checks.values() if each.task is not None]
                if not running:
                    return
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                self._settle()
        except asyncio.CancelledError:
            # Out of time: the order before these groups will never be decided. Proof of cheating holds in any order,
            # so it is used now; mere suspicion is dropped, or the result would depend on who was quick.
            for check in self._checks.values():
                if check.refused is not None and check.refused.reason in BLAMED and not check.judged:
                    check.judged = True
                    self._peers.judge(check)
            raise
        finally:
            await self._stop()

    def results(self) -> tuple[list[GroupCheck], list[tuple[GroupCheck, PeerRefused]]]:
        """The accepted groups in the order of the draw, and the refused ones with their reasons."""
        standing, repeated = self._standing(stopped=True)
        refused = [(each, each.refused) for each in self._checks.values() if each.refused is not None]
        return [check for place in standing if (check := self._at(place)) is not None], refused + repeated

    def _standing(self, *, stopped: bool = False) -> tuple[list[int], list[tuple[GroupCheck, PeerRefused]]]:
        """Assign places by the current verdicts; also return the groups that repeat one with a place. `stopped`: no
        further check will run, so a group without a verdict gets no place."""
        # Recomputed from nothing each time instead of updated: a verdict can revoke places far behind it (a caught peer,
        # a duplicate), and with a few dozen candidates this costs less than the bookkeeping that would undo them.
        near = SeenGroups()
        silent: set[str] = set()
        failed: dict[str, int] = {}
        """Strangers whose content did not arrive, with their weights."""
        repeated: list[tuple[GroupCheck, PeerRefused]] = []

        def is_out(manifest: Manifest) -> bool:
            if self._peers.is_caught(manifest.peer) or manifest.peer in silent:
                return True
            if sum(failed.values()) >= PATIENCE and not self._peers.is_proven(manifest.peer):
                return True
            check = self._checks.get((manifest.peer, manifest.digest))
            if check is None:
                return stopped
            if check.timed_out:
                # Only groups *behind* this one lose their place. One before it may have been delivered, and stays.
                silent.add(manifest.peer)
            if check.is_not_fetched and not self._peers.is_proven(manifest.peer):
                failed[manifest.peer] = TIMEOUT_WEIGHT if check.timed_out else 1
            if check.verified is None:
                return stopped or check.refused is not None
            assert check.group is not None, "it was decoded before it was verified"
            try:
                # Against groups of earlier rounds and those with a place before this one. The checker has compared it
                # with earlier rounds only: which of two duplicates comes first is not known before the order is.
                self._seen.check(manifest.digest, check.group, near)
            except PeerRefused as refused:
                repeated.append((check, refused))
                return True
            near.add(manifest.digest, check.group)
            return False

        return places(self._order, self._count, is_out=is_out, per_peer=self._per_peer), repeated

    def _at(self, place: int) -> GroupCheck | None:
        manifest = self._order[place]
        return self._checks.get((manifest.peer, manifest.digest))

    def _start(self) -> None:
        """Begin as many checks as may run concurrently."""
        standing, _ = self._standing()
        checks = self._checks.values()
        free = self._beam_size - sum(each.task is not None for each in checks)
        delivered = {each.manifest.peer for each in checks if each.data}
        asked = {each.manifest.peer for each in checks if each.task is not None}
        for place in standing:
            manifest = self._order[place]
            if free <= 0:
                return
            # A peer that has not delivered its first group yet may be dead: one open fetch is all it may hold.
            if self._at(place) is not None or (manifest.peer in asked and manifest.peer not in delivered):
                continue
            check = GroupCheck(manifest)
            check.task = asyncio.create_task(self._check(check), name="check foreign group")
            self._checks[manifest.peer, manifest.digest] = check
            asked.add(manifest.peer)
            free -= 1

    async def _check(self, check: GroupCheck) -> None:
        try:
            await self._checker.check(check)
        except PeerRefused as refused:
            check.refused = refused

    def _settle(self) -> None:
        """Collect finished checks, then judge their peers in the order of the draw."""
        for check in self._checks.values():
            if check.task is not None and check.task.done():
                task, check.task = check.task, None
                task.result()  # an exception other than a refusal is a bug of this node, and ends the round
        # One at a time: each judgement may put a peer into quarantine, which changes who has a place.
        while (found := self._next_to_judge()) is not None:
            found.judged = True
            self._peers.judge(found)

    def _next_to_judge(self) -> GroupCheck | None:
        """The first finished check with nothing undecided before it."""
        # Strikes count "in a row", so a peer's groups must be judged in the order of the draw, not as they arrive.
        # Groups behind a timeout of the same peer are skipped: whether they had been asked for is a matter of timing.
        silent: set[str] = set()
        standing, _ = self._standing()
        for place in range(self._decided(standing)):
            check = self._at(place)
            if check is None or check.manifest.peer in silent:
                continue
            if check.is_done and not check.judged:
                return check
            if check.timed_out:
                silent.add(check.manifest.peer)
        return None

    def _decided(self, standing: Sequence[int]) -> int:
        """The length of the prefix of the order that no running or future check can change."""
        for place in standing:
            check = self._at(place)
            if check is None or not check.is_done:
                return place
        # All places are filled: what lies behind the last one is not looked at any more. Otherwise the order is used up.
        full = len(standing) >= self._count
        return standing[-1] + 1 if full and standing else len(self._order)

    async def _stop(self) -> None:
        """Cancel the running checks and wait for them."""
        running = [each for each in self._checks.values() if each.task is not None]
        for check in running:
            assert check.task is not None
            check.task.cancel()
        await asyncio.gather(*(check.task for check in running if check.task), return_exceptions=True)
        for check in running:
            check.task = None
