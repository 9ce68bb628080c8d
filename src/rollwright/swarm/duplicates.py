"""Detection of groups that were seen before: the same bytes, the same task, or nearly the same answers.

Long answers are compared by a sketch (the smallest hashes of their word n-grams), so a changed word or another order of
members hides nothing. Short answers are compared only together with their task, because honest short answers repeat. The
memory holds a bounded number of groups, the newest.
"""

from collections import Counter, OrderedDict
from hashlib import blake2b

from rollwright.swarm.content import SharedGroup
from rollwright.swarm.refusals import PeerRefusal, PeerRefused

REMEMBERED = 4096
"""Groups, each with some 8 sketches of 16 numbers; about 60 MB when full."""

SKETCH = 16
"""Hashes in the sketch of an answer."""

RUN = 4
"""Words in an n-gram: fewer would match honest answers, more would miss edited copies."""

LONG = 24
"""Words from which on an answer is compared without its task."""

NEAR = 0.75
"""Share of a sketch that one earlier group must have for a near duplicate."""


class SeenGroups:
    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._groups: OrderedDict[str, tuple[tuple[str, str, int], list[int]]] = OrderedDict()
        """By digest: the task with its peer, and the hashes of the answers."""
        self._tasks: set[tuple[str, str, int]] = set()
        self._owners: dict[int, str] = {}
        """The newest group with each hash."""

    def check(self, digest: str, group: SharedGroup, beside: "SeenGroups | None" = None) -> None:
        """Raise `PeerRefused` for a group that repeats one of these, or one of `beside`."""
        known = [self] if beside is None else [self, beside]
        if any(digest in each._groups for each in known):
            raise PeerRefused(PeerRefusal.DUPLICATE, f"content {digest[:12]} again")
        if any(_task(group) in each._tasks for each in known):
            raise PeerRefused(
                PeerRefusal.DUPLICATE_TASK, f"task {group.recipe.index} of {group.recipe.env} again"
            )
        sketches = _sketches(group)
        near = sum(any(each._is_near(sketch) for each in known) for sketch in sketches)
        if 2 * near > len(sketches):
            raise PeerRefused(
                PeerRefusal.NEAR_DUPLICATE, f"{near} of {len(sketches)} answers were seen before"
            )

    def add(self, digest: str, group: SharedGroup) -> None:
        """Remember a group. Own groups too, so that copies of them are refused."""
        if digest in self._groups:
            return
        hashes = [each for sketch in _sketches(group) for each in sketch]
        self._groups[digest] = (_task(group), hashes)
        self._tasks.add(_task(group))
        self._owners.update(dict.fromkeys(hashes, digest))
        while len(self._groups) > self._remembered:
            gone, (task, old) = self._groups.popitem(last=False)
            self._tasks.discard(task)
            for each in old:
                if self._owners.get(each) == gone:
                    del self._owners[each]

    def peers(self) -> set[str]:
        """The peers of the remembered groups, this node included."""
        return {peer for peer, *_ in self._tasks}

    def snapshot(self) -> list[tuple[str, tuple[str, str, int]]]:
        """The state that outlives a restart; without the sketches, which are large and only an additional check."""
        return [(digest, task) for digest, (task, _) in self._groups.items()]

    def restore(self, seen: list[tuple[str, tuple[str, str, int]]]) -> None:
        self._groups = OrderedDict((digest, (task, [])) for digest, task in seen[-self._remembered :])
        self._tasks = {task for task, _ in self._groups.values()}
        self._owners = {}

    def _is_near(self, sketch: frozenset[int]) -> bool:
        owners = Counter(owner for each in sketch if (owner := self._owners.get(each)) is not None)
        return bool(owners) and max(owners.values()) >= NEAR * len(sketch)


def _task(group: SharedGroup) -> tuple[str, str, int]:
    return group.peer, group.recipe.env, group.recipe.index


def _sketches(group: SharedGroup) -> list[frozenset[int]]:
    """One for each member."""
    return [
        _sketch("\n".join(each.text for each in member.actions), group.recipe.task)
        for member in group.members
    ]


def _sketch(text: str, task: str) -> frozenset[int]:
    words = text.casefold().split()
    if len(words) < LONG:
        return frozenset([_hash(f"{task} {' '.join(words)}")])
    runs = {" ".join(words[place : place + RUN]) for place in range(len(words) - RUN + 1)}
    return frozenset(sorted(map(_hash, runs))[:SKETCH])


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big")
