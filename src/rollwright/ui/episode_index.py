"""Index over a run's finished episodes: one small row each, and all text in a file that is searched.

Invariants:
- Trajectories are never kept: a row holds figures and where its record is, and the text is in an unnamed temporary file.
- Rows are numbered in the order of their ends and never change, except for the filters that catch a whole group, which
  are known when its last member has ended.
- A search finds a text in any case, and names the turn. Its cost follows the size of the text, not the number of matches.
"""

import mmap
import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from sys import intern
from threading import RLock
from typing import Any, NamedTuple

import msgspec

from rollwright.rollout.filters import Catches, Filter, judge, judge_group
from rollwright.run.trajectory_log import Place
from rollwright.trajectory import Trajectory, Turn, leaves

MOST_COUNTED = 10_000
"""Matching episodes that a search counts; a common word would match all of them."""

HITS_SHOWN = 3
"""Matches of one episode that are shown."""

SNIPPET = 60
"""Characters on each side of a match."""

HEAD = -1
"""Turn of a text that stands before the first turn."""


ELSEWHERE = Place(0, 0)
"""Place of an episode that is in no log: a store has it."""


class EpisodeRow(msgspec.Struct, gc=False):
    """One finished episode, without its turns."""

    number: int
    rollout_id: str
    group_id: str
    tag: str
    seed: int
    reward: float
    penalty: float
    success: float | None
    stop: str | None
    turns: int
    leaves: int
    tokens: int
    prompt_tokens: int
    agents: tuple[str, ...]
    caught: tuple[str, ...]
    """Filters that caught it."""
    error: str | None
    started: float | None
    wall: float
    oldest: int | None
    """Oldest policy version among its tokens."""
    newest: int | None
    components: dict[str, float]


class EpisodeQuery(msgspec.Struct, frozen=True):
    """Which episodes to list. Everything given must match."""

    text: str = ""
    tag: str = ""
    stop: str = ""
    caught: str = ""
    """Filter that caught it; `*`: any filter."""
    agent: str = ""
    group: str = ""
    mode: str = ""
    """`train` or `val`."""
    success: str = ""
    """`yes` or `no`."""
    least: float | None = None
    """Least reward."""
    most: float | None = None
    sort: str = ""
    """A field of the row, with `-` in front for falling values; empty: as they ended, the newest first."""
    offset: int = 0
    limit: int = 50

    def matches(self, row: EpisodeRow) -> bool:
        return (
            (not self.tag or row.tag == self.tag)
            and (not self.stop or row.stop == self.stop)
            and (not self.caught or (bool(row.caught) if self.caught == "*" else self.caught in row.caught))
            and (not self.agent or self.agent in row.agents)
            and (not self.group or row.group_id == self.group)
            and (not self.mode or _mode(row.group_id) == self.mode)
            and (not self.success or _is_solved(row) == self.success)
            and (self.least is None or row.reward >= self.least)
            and (self.most is None or row.reward <= self.most)
        )


class Listed(NamedTuple):
    """One page of episodes."""

    rows: list[EpisodeRow]
    hits: dict[int, list[int]]
    """Turns that match the text, by the number of the row."""
    total: int
    at_least: bool
    """Whether there are more than `total`."""


SORTS = ("reward", "turns", "tokens", "wall", "started", "rollout_id")


class EpisodeIndex:
    """Rows and text of the episodes added so far. Safe to use from several threads."""

    def __init__(self, filters: Sequence[Filter] = (), is_filtered: Callable[[str], bool] = bool) -> None:
        """`filters`: of the run; `is_filtered` says whether they apply to a group id."""
        self.rows: list[EpisodeRow] = []
        self.places: list[Place] = []
        self.turns = 0
        self.tags: dict[str, int] = {}
        self.stops: dict[str, int] = {}
        self.caught: dict[str, int] = {}
        self.agents: dict[str, int] = {}
        self._by_rollout: dict[str, int] = {}
        self._by_group: dict[str, list[int]] = {}
        self._filters = filters
        self._is_filtered = is_filtered
        self._waiting: dict[str, list[Trajectory]] = {}
        """Members of groups whose filters have not been judged yet."""
        self._corpus = _Corpus()
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, outline: Trajectory, place: Place = ELSEWHERE, *, group_size: int = 0) -> None:
        """Add a finished episode; one that is there already is ignored. `group_size`: members of a complete group."""
        with self._lock:
            if outline.rollout_id in self._by_rollout:
                return
            number = len(self.rows)
            row = self._row(number, outline)
            self.rows.append(row)
            self.places.append(place)
            self._by_rollout[row.rollout_id] = number
            self._by_group.setdefault(row.group_id, []).append(number)
            self.turns += row.turns
            for counts, names in (
                (self.tags, (row.tag,)),
                (self.stops, (str(row.stop),)),
                (self.caught, row.caught),
                (self.agents, row.agents),
            ):
                for name in names:
                    counts[name] = counts.get(name, 0) + 1
            self._corpus.add(number, outline)
            if self._filters and group_size and self._is_filtered(row.group_id):
                self._judge_when_complete(outline, group_size)

    def number_of(self, rollout_id: str) -> int | None:
        return self._by_rollout.get(rollout_id)

    def group(self, group_id: str) -> list[EpisodeRow]:
        """Members that have ended, in the order of their ids."""
        found = [self.rows[each] for each in self._by_group.get(group_id, ())]
        return sorted(found, key=lambda each: (len(each.rollout_id), each.rollout_id))

    def find(self, query: EpisodeQuery) -> Listed:
        if query.text:
            return self._search(query)
        rows = self.rows
        if query == EpisodeQuery(offset=query.offset, limit=query.limit, sort=query.sort):
            found = list(rows)
        else:
            found = [each for each in list(rows) if query.matches(each)]
        name = query.sort.removeprefix("-")
        if name in SORTS:
            found.sort(key=lambda each: getattr(each, name) or 0, reverse=query.sort.startswith("-"))
        else:
            found.reverse()
        page = found[query.offset : query.offset + query.limit]
        return Listed(page, {}, len(found), False)

    def close(self) -> None:
        self._corpus.close()

    def _search(self, query: EpisodeQuery) -> Listed:
        hits: dict[int, list[int]] = {}
        for number, turn in self._corpus.find(query.text):
            if number in hits:
                if len(hits[number]) < HITS_SHOWN:
                    hits[number].append(turn)
            elif query.matches(self.rows[number]):
                hits[number] = [turn]
                if len(hits) > MOST_COUNTED:
                    break
        numbers = list(hits)[query.offset : query.offset + query.limit]
        total = min(len(hits), MOST_COUNTED)
        return Listed(
            [self.rows[each] for each in numbers],
            {each: hits[each] for each in numbers},
            total,
            len(hits) > MOST_COUNTED,
        )

    def _row(self, number: int, outline: Trajectory) -> EpisodeRow:
        timing, turns = outline.timing, outline.turns
        versions = [run.version for turn in turns for run in turn.versions]
        caught = {turn.filtered for turn in turns if turn.filtered}
        if self._filters and self._is_filtered(outline.group_id):
            catches = Catches()
            judge(self._filters, outline, catches)
            caught |= set(catches.by_filter)
        return EpisodeRow(
            number=number,
            rollout_id=outline.rollout_id,
            group_id=intern(outline.group_id),
            tag=intern(outline.tag),
            seed=outline.seed,
            reward=outline.reward,
            penalty=outline.penalty,
            success=outline.success_share,
            stop=None if outline.stop is None else str(outline.stop),
            turns=len(turns),
            leaves=len(leaves(turns)),
            tokens=outline.sampled_tokens,
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            agents=tuple(dict.fromkeys(intern(turn.agent) for turn in turns)),
            caught=tuple(sorted(intern(each) for each in caught)),
            error=None if outline.error is None else f"{outline.error.boundary}: {outline.error.message}",
            started=None if timing is None else timing.started,
            wall=outline.duration if timing is None else timing.wall,
            oldest=min(versions, default=None),
            newest=max(versions, default=None),
            components=dict(outline.components),
        )

    def _judge_when_complete(self, outline: Trajectory, group_size: int) -> None:
        waiting = self._waiting.setdefault(outline.group_id, [])
        waiting.append(outline)
        if len(waiting) < group_size:
            return
        del self._waiting[outline.group_id]
        catches = Catches()
        in_order = sorted(waiting, key=lambda each: (len(each.rollout_id), each.rollout_id))
        judge_group(self._filters, in_order, catches)
        for name, catch in catches.by_filter.items():
            everybody = catch.example == outline.group_id
            for row in self.group(outline.group_id):
                if (everybody or row.rollout_id == catch.example) and name not in row.caught:
                    row.caught = (*row.caught, name)
                    self.caught[name] = self.caught.get(name, 0) + 1


class _Corpus:
    """All text in lower case, one piece after the other, in an unnamed file; of each piece its start, row and turn."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="rollwright-ui-")  # noqa: SIM115 - closed with the index
        self._starts = array("Q")
        self._numbers = array("L")
        self._turns = array("l")
        self._size = 0
        self._lock = RLock()

    def add(self, number: int, outline: Trajectory) -> None:
        pieces = [(HEAD, _head(outline)), *((turn.id, _said(turn)) for turn in outline.turns)]
        encoded = bytearray()
        with self._lock:
            for turn, text in pieces:
                self._starts.append(self._size + len(encoded))
                self._numbers.append(number)
                self._turns.append(turn)
                encoded += text.lower().encode("utf-8", "replace") + b"\0"
            os.pwrite(self._file.fileno(), encoded, self._size)
            self._size += len(encoded)

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Rows and turns with the text, in order; each turn once."""
        wanted = text.lower().encode("utf-8", "replace")
        if not wanted or not self._size:
            return
        with self._lock:
            size, count = self._size, len(self._starts)
        with mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) as data:
            position = data.find(wanted)
            while position >= 0:
                piece = bisect_right(self._starts, position, 0, count) - 1
                yield self._numbers[piece], self._turns[piece]
                position = data.find(wanted, self._starts[piece + 1]) if piece + 1 < count else -1

    def close(self) -> None:
        self._file.close()


def snippets(trajectory: Trajectory, text: str, turns: Sequence[int]) -> list[dict[str, Any]]:
    """The text around each match, as it was written."""
    found = []
    for number in turns:
        said = _head(trajectory) if number == HEAD else _said(trajectory.turns[number])
        place = said.lower().find(text.lower())
        start = max(0, place - SNIPPET)
        found.append(
            {
                "turn": number,
                "before": ("…" if start else "") + said[start:place],
                "match": said[place : place + len(text)],
                "after": said[place + len(text) : place + len(text) + SNIPPET],
            }
        )
    return found


def _head(outline: Trajectory) -> str:
    parts = [outline.rollout_id, outline.tag, *(message.content for message in outline.opening)]
    parts += [outline.observation, outline.returned or "", outline.error.message if outline.error else ""]
    parts += [message.content for message in outline.conversation]
    return "\n".join(filter(None, parts))


def _said(turn: Turn) -> str:
    parts = [turn.text, *(f"{call.name} {call.arguments}" for call in turn.tool_calls)]
    if turn.outcome is not None:
        parts.append(turn.outcome.observation)
    return "\n".join(parts)


def _mode(group_id: str) -> str:
    stream = group_id.rpartition(".")[2]
    return "val" if stream.startswith("val") else "train"


def _is_solved(row: EpisodeRow) -> str:
    return "" if row.success is None else "yes" if row.success >= 1 else "no"
