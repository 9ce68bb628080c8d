"""A store whose trajectories are objects beside its rows.

Wraps any other store; all calls but those about trajectories pass through unchanged. Always true:
- An object is durable before the row that refers to it is committed: a finished rollout has its trajectory.
- A report that is refused, or whose process dies between the two, leaves an object that no row refers to. It is collected by
  its name and age (`collect_orphans`); nothing that a row refers to is ever deleted before the row's reference is.
- A key names the rollout, the attempt and the content, so no report overwrites the object of another.
- An object that is missing, or is not what was written, costs its own trajectory only: its bytes are replaced by a note that
  names it (`rollwright.trajectory.elsewhere`), which readers report as this rollout's failure.
- Rows written without objects are read as they are, so a store may be switched either way at any time.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from hashlib import sha256
from time import monotonic
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from msgspec.structs import replace

from rollwright.errors import RollwrightError
from rollwright.store import calls
from rollwright.store.api import Store
from rollwright.store.call_kinds import MAX_ITEMS, Result, StoreCall
from rollwright.store.objects.buckets import Bucket
from rollwright.trajectory.elsewhere import ObjectReference, read_reference, unreadable

INLINE_BYTES = 1024
"""Trajectories up to this size stay in the row: a reference and a request would cost more."""

SHARDS = 256
"""Folders over which the rollouts are spread, by their names: one listing of orphans reads one of them."""

ORPHAN_SECONDS = 86_400.0
"""Age from which an object without a row is an orphan: far longer than a report is under way."""

SWEEP_SECONDS = 60.0
"""Least time between two shards that are searched for orphans; all of them take some four hours."""

_NAME_LENGTH = 200
"""Characters of a rollout's or attempt's id in a key; longer ones are hashed."""

_log = logging.getLogger(__name__)


class ObjectBackedStore(Store):
    def __init__(self, inner: Store, bucket: Bucket, *, inline_bytes: int = INLINE_BYTES) -> None:
        self._inner = inner
        self._bucket = bucket
        self._inline_bytes = inline_bytes
        self.fork_error = type(inner).fork_error  # type: ignore[misc]
        self._swept = monotonic()
        self._next_shard = int.from_bytes(sha256(str(id(self)).encode()).digest()[:1], "big")
        """Processes begin at different shards."""
        self._background: set[asyncio.Task[Any]] = set()

    def execute(self, call: StoreCall[Result]) -> Coroutine[Any, Any, Result]:
        handler = self._HANDLERS.get(type(call))
        return self._inner.execute(call) if handler is None else handler(self, call)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._inner.close()
        self._bucket.close()

    async def collect_orphans(
        self, shard: int, *, older_than: float = ORPHAN_SECONDS, unknown: bool = False
    ) -> int:
        """Delete the objects of a shard that no row refers to; return how many.

        `unknown`: also those of rollouts that this store does not know, which a process that died while it deleted rollouts
        leaves; only where no other store has its objects in the same place.
        """
        listed = await self._bucket.objects(f"{shard:02x}")
        old = [each.key for each in listed if each.age > older_than]
        deleted = 0
        for start in range(0, len(old), MAX_ITEMS):
            keys = old[start : start + MAX_ITEMS]
            names = {key: unquote(key.split("/")[1]) for key in keys if key.count("/") == 2}
            ids = sorted(set(names.values()))
            kept = await self._references(ids, failed=True)
            known = {
                each.rollout_id
                for each in await self._inner.execute(calls.QueryRollouts(rollout_ids=ids, limit=len(ids)))
            }
            referred = {each.key for each in kept.values()}
            gone = [key for key in keys if key not in referred and (unknown or names.get(key) in known)]
            await self._bucket.delete(gone)
            deleted += len(gone)
        return deleted

    async def _update_attempt(self, call: calls.UpdateAttempt) -> Any:
        data = call.trajectory
        if data is None or len(data) <= self._inline_bytes or read_reference(data) is not None:
            return await self._inner.execute(call)
        digest = sha256(data).digest()
        reference = ObjectReference(_key(call.rollout_id, call.attempt_id, digest), digest, len(data))
        await self._bucket.put(reference.key, data)
        return await self._inner.execute(replace(call, trajectory=reference.to_bytes()))

    async def _get_trajectories(self, call: calls.GetTrajectories) -> dict[str, bytes]:
        found = await self._inner.execute(call)
        names = list(found)
        data = await asyncio.gather(*(self._read(name, found[name]) for name in names))
        return dict(zip(names, data, strict=True))

    async def _read(self, rollout_id: str, row: bytes) -> bytes:
        reference = read_reference(row)
        if reference is None:
            return row
        where = f"rollout {rollout_id}: the object {self._bucket.address}/{reference.key}"
        if not _is_safe(reference.key):
            return _told(f"{where} lies outside")
        data = await self._bucket.get(reference.key)
        if data is None:
            return _told(f"{where} is missing")
        if sha256(data).digest() != reference.sha256:
            return _told(f"{where} is damaged: {len(data)} bytes with another checksum, not {reference.size}")
        return data

    async def _release(self, call: calls.ReleaseTrajectories) -> int:
        kept = await self._references(call.rollout_ids)
        released = await self._inner.execute(call)
        await self._delete(kept)
        self._sweep()
        return released

    async def _delete_rollouts(self, call: calls.DeleteRollouts) -> int:
        kept = await self._references(call.rollout_ids, failed=True)
        deleted = await self._inner.execute(call)
        await self._delete(kept)
        return deleted

    async def _delete_finished(self, call: calls.DeleteFinished) -> int:
        deleted, left = 0, call.limit
        while left:
            size = min(left, MAX_ITEMS) if left > 0 else MAX_ITEMS
            oldest = await self._inner.execute(calls.ReadCompletions(after=0, limit=size))
            kept = await self._references([each.rollout_id for each in oldest], failed=True)
            gone = await self._inner.execute(replace(call, limit=size))
            deleted, left = deleted + gone, left - gone
            rest = await self._inner.execute(calls.ReadCompletions(after=0, limit=1))
            first = rest[0].cursor if rest else None
            names = {each.rollout_id for each in oldest if first is None or each.cursor < first}
            await self._delete({name: each for name, each in kept.items() if name in names})
            if gone < size:
                break
        self._sweep()
        return deleted

    async def _references(
        self, rollout_ids: Sequence[str], *, failed: bool = False
    ) -> dict[str, ObjectReference]:
        """The references in the rows of these rollouts."""
        if not rollout_ids:
            return {}
        rows = await self._inner.execute(calls.GetTrajectories(list(rollout_ids), failed))
        found = {name: read_reference(row) for name, row in rows.items()}
        return {name: each for name, each in found.items() if each is not None and _is_safe(each.key)}

    async def _delete(self, references: dict[str, ObjectReference]) -> None:
        """Delete objects whose rows are gone; what cannot be deleted now is an orphan."""
        try:
            await self._bucket.delete(each.key for each in references.values())
        except RollwrightError as error:
            _log.warning("some objects were not deleted, and are collected later: %s", error)

    def _sweep(self) -> None:
        """Collect the orphans of one shard in the background, if it is time."""
        if monotonic() - self._swept < SWEEP_SECONDS or self._background:
            return
        self._swept = monotonic()
        self._next_shard = (self._next_shard + 1) % SHARDS
        task = asyncio.create_task(self._sweep_shard(self._next_shard), name="collect orphans")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _sweep_shard(self, shard: int) -> None:
        try:
            if gone := await self.collect_orphans(shard):
                _log.info("%s: %d objects without a row were deleted", self._bucket.address, gone)
        except RollwrightError as error:
            _log.warning("orphans were not looked for: %s", error)

    _HANDLERS: ClassVar[dict[type[StoreCall[Any]], Callable[..., Coroutine[Any, Any, Any]]]] = {
        calls.UpdateAttempt: _update_attempt,
        calls.GetTrajectories: _get_trajectories,
        calls.ReleaseTrajectories: _release,
        calls.DeleteRollouts: _delete_rollouts,
        calls.DeleteFinished: _delete_finished,
    }


def shard_of(rollout_id: str) -> int:
    """The shard that a rollout's objects are in."""
    return sha256(rollout_id.encode()).digest()[0]


def _key(rollout_id: str, attempt_id: str, digest: bytes) -> str:
    return f"{shard_of(rollout_id):02x}/{_name(rollout_id)}/{_name(attempt_id)}.{digest.hex()[:16]}"


def _name(part: str) -> str:
    """An id as one part of a path."""
    safe = quote(part, safe="")
    if len(safe) > _NAME_LENGTH or not safe.strip("."):
        return sha256(part.encode()).hexdigest()
    return safe


def _is_safe(key: str) -> bool:
    """Whether a key from a row is one that this module makes: a worker may have committed anything."""
    parts = key.split("/")
    return len(parts) == 3 and all(
        part.strip(".") and "\\" not in part and "\0" not in part for part in parts
    )


def _told(why: str) -> bytes:
    _log.warning("%s", why)
    return unreadable(why)
