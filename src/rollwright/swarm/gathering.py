"""One round's search for foreign groups: looks at them side by side, and decides in the order of the draw.

True of it:
- What is taken follows from the order and from what each group is found to be, never from who was quick: a place is
  kept for every group that is still looked at, and whether one repeats another, or a peer is caught, is decided in the
  order of the draw.
- A peer of which nothing is taken changes nothing for the others: a refused group, or one of a peer that is caught
  meanwhile, gives its place to the next in the order.
- A group is looked at only while fewer than `count` before it may still be taken, so nothing is checked in vain.
- A peer that does not answer is asked once: for a second group only when the first has come, and not at all in this
  round when it has not.
- Strangers that announce what they do not give cost a round a bounded time: beyond `PATIENCE` no other stranger has a
  place in it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollwright.swarm.content import SharedGroup
from rollwright.swarm.duplicates import SeenGroups
from rollwright.swarm.refusals import BLAMED, PeerRefusal, PeerRefused
from rollwright.swarm.selection import places
from rollwright.swarm.signed import Manifest
from rollwright.swarm.verification import Verified

PATIENCE = 64
"""Strangers, of which no group has held up yet, that may announce content which nobody has. What is announced behind them
can be had in a later round."""

SILENCE = 8
"""So many of them a stranger counts for that lets the time for its content go by: eight such cost a round twenty seconds,
with four fetches at a time and ten seconds for each."""


@dataclass
class Look:
    """What is found out about one group, while it is."""

    manifest: Manifest
    data: bytes = b""
    """Its content, once that has come."""
    group: SharedGroup | None = None
    """The content, once it is decoded."""
    verified: Verified | None = None
    """Once it held up."""
    refused: PeerRefused | None = None
    """Why it did not."""
    unanswered: bool = False
    """Whether the peer let the time for its content go by."""
    judged: bool = False
    """Whether the peer was judged by it."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_done(self) -> bool:
        return self.verified is not None or self.refused is not None


Looker = Callable[[Look], Awaitable[None]]
"""Fetches and checks a group: fills in all that it finds, or raises `PeerRefused`."""

Judge = Callable[[Look], None]
"""Draws the conclusions about the peer from a look that is done."""


class Gathering:
    def __init__(
        self,
        order: Sequence[Manifest],
        count: int,
        *,
        per_peer: int | None,
        beam_size: int,
        seen: SeenGroups,
        is_caught: Callable[[str], bool],
        look: Looker,
        judge: Judge,
        is_proven: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`seen`: groups of earlier rounds; nothing is added to it here. `is_proven`: whether a group of a peer has held
        up in an earlier round."""
        self._order = order
        self._seen = seen
        self._count = count
        self._per_peer = per_peer
        self._beam_size = beam_size
        self._is_caught = is_caught
        self._is_proven = is_proven
        self._look = look
        self._judge = judge
        self._looks: dict[tuple[str, str], Look] = {}

    async def run(self) -> None:
        """Until there are `count` groups or no more to look at. May be cancelled at any time: the results are then
        those that were found until then."""
        try:
            while True:
                self._start()
                running = [each.task for each in self._looks.values() if each.task is not None]
                if not running:
                    return
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                self._settle()
        except asyncio.CancelledError:
            for look in self._looks.values():
                if look.refused is not None and look.refused.reason in BLAMED and not look.judged:
                    look.judged = True
                    self._judge(look)  # its turn does not come any more
            raise
        finally:
            await self._stop()

    def results(self) -> tuple[list[Look], list[tuple[Look, PeerRefused]]]:
        """Those that held up and have a place, in the order of the draw; and those that are refused."""
        standing, repeated = self._standing(stopped=True)
        refused = [(each, each.refused) for each in self._looks.values() if each.refused is not None]
        return [look for place in standing if (look := self._at(place)) is not None], refused + repeated

    def _standing(self, *, stopped: bool = False) -> tuple[list[int], list[tuple[Look, PeerRefused]]]:
        """Who has a place as things stand, and who has none because it repeats one that has. `stopped`: nothing more
        will be looked at."""
        near = SeenGroups()
        silent: set[str] = set()
        in_vain: dict[str, int] = {}
        """Strangers whose content did not come, and how much each counts."""
        repeated: list[tuple[Look, PeerRefused]] = []

        def is_out(manifest: Manifest) -> bool:
            if self._is_caught(manifest.peer) or manifest.peer in silent:
                return True
            if sum(in_vain.values()) >= PATIENCE and not self._is_proven(manifest.peer):
                return True
            look = self._looks.get((manifest.peer, manifest.digest))
            if look is None:
                return stopped
            if look.unanswered:
                silent.add(manifest.peer)
            if _is_not_fetched(look) and not self._is_proven(manifest.peer):
                in_vain[manifest.peer] = SILENCE if look.unanswered else 1
            if look.verified is None:
                return stopped or look.refused is not None
            assert look.group is not None, "it was decoded before it was verified"
            try:
                self._seen.check(manifest.digest, look.group, near)
            except PeerRefused as refused:
                repeated.append((look, refused))
                return True
            near.add(manifest.digest, look.group)
            return False

        return places(self._order, self._count, is_out=is_out, per_peer=self._per_peer), repeated

    def _at(self, place: int) -> Look | None:
        manifest = self._order[place]
        return self._looks.get((manifest.peer, manifest.digest))

    def _start(self) -> None:
        """Begins to look at as many as may be looked at together."""
        standing, _ = self._standing()
        looks = self._looks.values()
        free = self._beam_size - sum(each.task is not None for each in looks)
        came = {each.manifest.peer for each in looks if each.data}
        asked = {each.manifest.peer for each in looks if each.task is not None}
        for place in standing:
            manifest = self._order[place]
            if free <= 0:
                return
            if self._at(place) is not None or (manifest.peer in asked and manifest.peer not in came):
                continue
            look = Look(manifest)
            look.task = asyncio.create_task(self._looked(look), name="look")
            self._looks[manifest.peer, manifest.digest] = look
            asked.add(manifest.peer)
            free -= 1

    async def _looked(self, look: Look) -> None:
        try:
            await self._look(look)
        except PeerRefused as refused:
            look.refused = refused

    def _settle(self) -> None:
        """Draws the conclusions from the looks that are done, in the order of the draw."""
        for look in self._looks.values():
            if look.task is not None and look.task.done():
                task, look.task = look.task, None
                task.result()  # whatever is no refusal is a fault of this node
        while (found := self._next_to_judge()) is not None:
            found.judged = True
            self._judge(found)

    def _next_to_judge(self) -> Look | None:
        """The first that is done, before which nothing is open; what lies behind a peer's silence does not count."""
        silent: set[str] = set()
        standing, _ = self._standing()
        for place in range(self._decided(standing)):
            look = self._at(place)
            if look is None or look.manifest.peer in silent:
                continue
            if look.is_done and not look.judged:
                return look
            if look.unanswered:
                silent.add(look.manifest.peer)
        return None

    def _decided(self, standing: Sequence[int]) -> int:
        """Up to where in the order nothing is open any more."""
        for place in standing:
            look = self._at(place)
            if look is None or not look.is_done:
                return place
        full = len(standing) >= self._count
        return standing[-1] + 1 if full and standing else len(self._order)

    async def _stop(self) -> None:
        running = [each for each in self._looks.values() if each.task is not None]
        for look in running:
            assert look.task is not None
            look.task.cancel()
        await asyncio.gather(*(look.task for look in running if look.task), return_exceptions=True)
        for look in running:
            look.task = None


def _is_not_fetched(look: Look) -> bool:
    return look.refused is not None and look.refused.reason is PeerRefusal.NOT_FETCHED
