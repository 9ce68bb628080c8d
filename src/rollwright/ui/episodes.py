"""Episodes of a source for the page: lists, one trajectory, its tokens, its forest, its group, pairs of validations.

Invariants: at most `KEPT` trajectories are in memory. An episode that is not indexed yet is waited for by the page, never by
the server: the answer names the share that is indexed.
"""

import asyncio
import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollwright.errors import FormatError
from rollwright.rollout.filters import Catches, judge
from rollwright.trajectory import Trajectory
from rollwright.ui.catalogue import Catalogue, Source
from rollwright.ui.episode_data import TURNS_AT_ONCE, forest_of, head_of, member_of, tokens_of_turn, turn_of
from rollwright.ui.episode_index import EpisodeQuery, EpisodeRow, snippets
from rollwright.ui.folder_source import FolderSource
from rollwright.ui.judging import GroupView, view_group
from rollwright.ui.store_source import StoreSource

KEPT = 32
"""Trajectories that stay decoded: a group, and those beside it."""

SLICE = 0.05
"""Seconds of indexing between two looks at other work."""

FIRST_SLICE = 0.25
"""Seconds of indexing before the first answer: enough for a few thousand episodes."""

WATCHED_SECONDS = 30.0
"""Time after the last question in which a source is indexed further."""

FOLLOW_SECONDS = 0.4
"""Time between two looks for new episodes."""

MOST_PAIRS = 200

MOST_MEMBERS = 64


class NotIndexed(Exception):
    """The episode is not in the index, which is not complete; the page asks again."""


class NoSuchEpisode(Exception):
    """The index is complete and has no such episode."""


async def call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a source: a store's is awaited, a folder's runs in a thread, because it reads files."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await asyncio.to_thread(method, *arguments)


class Episodes:
    """Answers all questions about episodes, and indexes them in the background."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._kept: OrderedDict[tuple[str, int, int], Trajectory] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def follow(self) -> None:
        """Index what is looked at, until it is cancelled."""
        while True:
            more = False
            for source in self._catalogue.sources():
                if source.asked and time.monotonic() - source.asked < WATCHED_SECONDS:
                    more = await self._advance(source, SLICE) or more
            await asyncio.sleep(0.001 if more else FOLLOW_SECONDS)

    async def watch(self, source: Source) -> None:
        """Note that a source is looked at; its first episodes are indexed at once."""
        first = not source.asked
        source.asked = time.monotonic()
        if first:
            await self._advance(source, FIRST_SLICE)

    async def _advance(self, source: Source, seconds: float) -> bool:
        async with self._locks.setdefault(source.name, asyncio.Lock()):
            if isinstance(source, StoreSource):
                return await source.advance()
            return await asyncio.to_thread(source.advance, seconds)

    async def list(self, source: Source, query: EpisodeQuery) -> dict[str, Any]:
        await self.watch(source)
        index = source.index
        found = await asyncio.to_thread(index.find, query)
        rows = []
        for row in found.rows:
            shown = msgspec.to_builtins(row)
            if turns := found.hits.get(row.number):
                trajectory = await self._read(source, row.number)
                shown["hits"] = snippets(trajectory, query.text, turns)
            rows.append(shown)
        return {
            "rows": rows,
            "total": found.total,
            "at_least": found.at_least,
            "episodes": len(index),
            "turns": index.turns,
            "indexed": indexed_share(source),
            "tags": index.tags,
            "stops": index.stops,
            "caught": index.caught,
            "agents": index.agents,
            "notes": list(source.judging.notes),
        }

    async def show(self, source: Source, rollout_id: str, start: int, count: int) -> dict[str, Any]:
        """A trajectory with some of its turns."""
        row, trajectory = await self._find(source, rollout_id)
        group = await self._group_view(source, row.group_id)
        judged = next(
            (each for each in group.group.members if each.rollout_id == rollout_id), None
        ) or self._alone(source, trajectory)
        advantages = group.advantages.get(rollout_id)
        members = [each.rollout_id for each in source.index.group(row.group_id)]
        start = max(0, min(start, len(judged.turns)))
        turns = judged.turns[start : start + max(1, min(count, TURNS_AT_ONCE))]
        return {
            **head_of(judged),
            "number": row.number,
            "caught": row.caught,
            "replaced": group.group.replaced.get(rollout_id),
            "dropped": group.group.dropped,
            "leaves": row.leaves,
            "agents": row.agents,
            "members": members,
            "previous": self._beside(source, row.number, -1),
            "next": self._beside(source, row.number, 1),
            "step": self._step(source, row.group_id),
            "advantage_name": group.advantage,
            "advantages": advantages if advantages is None or len(advantages) <= 2000 else None,
            "notes": group.notes,
            "first_turn": start,
            "turns": [
                turn_of(judged, turn, None if advantages is None else advantages[turn.id]) for turn in turns
            ],
        }

    async def tokens(self, source: Source, rollout_id: str, turn: int) -> dict[str, Any]:
        row, trajectory = await self._find(source, rollout_id)
        group = await self._group_view(source, row.group_id)
        judged = next((each for each in group.group.members if each.rollout_id == rollout_id), None)
        judged = judged or self._alone(source, trajectory)
        if not 0 <= turn < len(judged.turns):
            raise NoSuchEpisode(f"{rollout_id}: has no turn {turn}")
        advantages = group.advantages.get(rollout_id)
        value = None if advantages is None else advantages[turn]
        of_tokens = group.token_advantages.get(rollout_id)
        each = None if of_tokens is None else of_tokens[turn]
        return await asyncio.to_thread(
            tokens_of_turn, judged, judged.turns[turn], source.prompts, value, each
        )

    async def forest(self, source: Source, rollout_id: str) -> dict[str, Any]:
        row, trajectory = await self._find(source, rollout_id)
        group = await self._group_view(source, row.group_id)
        judged = next((each for each in group.group.members if each.rollout_id == rollout_id), trajectory)
        nodes = await asyncio.to_thread(forest_of, judged, group.advantages.get(rollout_id))
        return {"rollout_id": rollout_id, "advantage_name": group.advantage, "nodes": nodes}

    async def group(self, source: Source, group_id: str) -> dict[str, Any]:
        await self.watch(source)
        if not source.index.group(group_id):
            raise self._missing(source, group_id)
        view = await self._group_view(source, group_id)
        shown = {each.rollout_id: each for each in view.group.members}
        rows = source.index.group(group_id)[:MOST_MEMBERS]
        members = [
            member_of(
                shown.get(row.rollout_id) or await self._read(source, row.number),
                view.advantages.get(row.rollout_id),
                sorted({*view.caught.get(row.rollout_id, ()), *row.caught}),
                view.group.replaced.get(row.rollout_id),
            )
            for row in rows
        ]
        return {
            "group_id": group_id,
            "advantage_name": view.advantage,
            "dropped": view.group.dropped,
            "notes": view.notes,
            "step": self._step(source, group_id),
            "members": members,
        }

    async def pairs(self, source: Source) -> dict[str, Any]:
        """The same levels in the first and in the last validation."""
        await self.watch(source)
        rows = await asyncio.to_thread(source.rows) if isinstance(source, FolderSource) else []
        validations = [row for row in rows if row.get("mode") == "val"]
        if len(validations) < 2:
            return {"pairs": [], "indexed": indexed_share(source)}
        first, last = validations[0], validations[-1]
        before = {
            (each.tag, each.seed): each for group in first["groups"] for each in source.index.group(group)
        }
        after = {
            (each.tag, each.seed): each for group in last["groups"] for each in source.index.group(group)
        }
        pairs = [(before[level], after[level]) for level in before if level in after]
        pairs.sort(key=lambda pair: (pair[0].reward - pair[1].reward, pair[0].tag, pair[0].seed))
        return {
            "first": first["step"],
            "last": last["step"],
            "pairs": [
                {"before": msgspec.to_builtins(one), "after": msgspec.to_builtins(other)}
                for one, other in pairs[:MOST_PAIRS]
            ],
            "total": len(pairs),
            "indexed": indexed_share(source),
        }

    # -- finding and decoding --------------------------------------------------------------------------

    async def _find(self, source: Source, rollout_id: str) -> tuple[EpisodeRow, Trajectory]:
        await self.watch(source)
        number = source.index.number_of(rollout_id)
        if number is None:
            raise self._missing(source, rollout_id)
        return source.index.rows[number], await self._read(source, number)

    def _missing(self, source: Source, name: str) -> Exception:
        if indexed_share(source) < 1:
            return NotIndexed(name)
        return NoSuchEpisode(f"{name}: there is no such finished episode in {source.name}")

    async def _read(self, source: Source, number: int) -> Trajectory:
        key = (source.name, id(source.index), number)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        encoded = await call(source.record, number)
        trajectory = await asyncio.to_thread(_decoded, encoded)
        self._kept[key] = trajectory
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return trajectory

    async def _group_view(self, source: Source, group_id: str) -> GroupView:
        members = [
            await self._read(source, row.number) for row in source.index.group(group_id)[:MOST_MEMBERS]
        ]
        judging = source.judging
        others: list[Sequence[Trajectory]] = []
        if judging.compares_batches and isinstance(source, FolderSource):
            groups, _ = await asyncio.to_thread(source.batch_of, group_id)
            for other in groups:
                if other != group_id:
                    rows = source.index.group(other)
                    others.append([await self._read(source, row.number) for row in rows])
        return await asyncio.to_thread(view_group, judging, members, lambda: others)

    def _alone(self, source: Source, trajectory: Trajectory) -> Trajectory:
        """A trajectory that its group does not have any more, after the filters."""
        judging = source.judging
        filters = judging.filters if judging.applies_to(trajectory.group_id) else ()
        return judge(filters, trajectory, Catches()).trajectory

    def _beside(self, source: Source, number: int, way: int) -> str | None:
        rows, other = source.index.rows, number + way
        return rows[other].rollout_id if 0 <= other < len(rows) else None

    def _step(self, source: Source, group_id: str) -> dict[str, Any] | None:
        if not isinstance(source, FolderSource):
            return None
        _, row = source.batch_of(group_id)
        return (
            None if row is None else {"mode": row["mode"], "step": row["step"], "version": row.get("version")}
        )


def indexed_share(source: Source) -> float:
    return source.indexed_share() if isinstance(source, FolderSource) else 1.0


def _decoded(encoded: bytes) -> Trajectory:
    try:
        return Trajectory.from_bytes(encoded)
    except FormatError as error:
        raise FormatError(f"the trajectory cannot be read: {error}") from error
