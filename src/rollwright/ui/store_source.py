"""A store as the page sees it: `http://…`, `postgresql://…` or a file, with the trajectories that it still has.

Invariants: the store is only read. A store that cannot be reached is a line in `problems`, and is tried again later. Episodes
are indexed by the completion log, each once; the trajectories of a run that has a folder are released from its store, and
are counted as missing.
"""

import asyncio
import time
from functools import cached_property
from typing import Any

from rollwright.addresses import redacted, scrubbed
from rollwright.config import RunConfig, build
from rollwright.errors import FormatError, RollwrightError
from rollwright.observe.prompt_text import PromptReader
from rollwright.run.worker_settings import CONFIG_KEY
from rollwright.store.api import Store
from rollwright.store.opening import open_store
from rollwright.store.records import RolloutStatus
from rollwright.trajectory import Trajectory
from rollwright.ui import figures
from rollwright.ui.episode_index import EpisodeIndex
from rollwright.ui.judging import Judging
from rollwright.ui.redaction import without_secrets
from rollwright.ui.store_view import look_into

PATIENCE = 3.0
"""Seconds to wait for a store that does not answer: a page has to say so soon."""

READ_AT_ONCE = 200
"""Trajectories read with one call."""


class StoreSource:
    """A store by its address. All methods belong to one event loop."""

    kind = "store"

    def __init__(self, address: str, name: str, prices: tuple[float, float] | None = None) -> None:
        self.name = name
        self.shown = redacted(address)
        self.asked = 0.0
        self._address = address
        self._prices = prices
        self._store: Store | None = None
        self._opening = asyncio.Lock()
        self._problem: str | None = None
        self._cursor = 0
        self._missing = 0
        self._settings: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None
        self.index = EpisodeIndex()

    async def store(self) -> Store:
        async with self._opening:
            if self._store is None:
                self._store = await open_store(self._address, must_exist=True, patience=PATIENCE)
            return self._store

    @cached_property
    def config(self) -> RunConfig | None:
        if self._settings is None:
            return None
        try:
            return build(self._settings, source=f"settings in {self.shown}")
        except (RollwrightError, ValueError, TypeError):
            return None

    @property
    def prompts(self) -> PromptReader | None:
        return None if self.config is None else PromptReader(self.config, download=False)

    @property
    def judging(self) -> Judging:
        return Judging.of(self.config)

    def problems(self) -> list[str]:
        told = [self._problem] if self._problem else []
        if self._missing:
            told.append(
                f"{self._missing:,} finished rollouts have no trajectory here; their run's folder has them"
            )
        return told

    async def card(self) -> dict[str, Any]:
        seen = await self.look()
        counts = seen.get("counts", {})
        done = sum(
            counts.get(str(each), 0)
            for each in (RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.CANCELLED)
        )
        total = sum(counts.values())
        busy = [each for each in seen.get("workers", ()) if each["state"] == "busy"]
        state = (
            figures.RunState.UNKNOWN
            if self._problem
            else figures.RunState.RUNNING
            if busy
            else figures.RunState.ENDED
        )
        tokens = sum(each["tokens"] or 0 for each in seen.get("workers", ())) or None
        rows = self.index.rows
        return {
            "id": self.name,
            "name": self.shown,
            "kind": "store",
            "state": state,
            "error": self._problem,
            "simulated": bool(self.config is not None and self.config.plays_simulated),
            "progress": {
                "steps": done,
                "most_steps": total or None,
                "share": done / total if total else None,
                "seconds_left": None,
                "unit": "rollouts",
            },
            "stage": None,
            "reward": sum(row.reward for row in rows[-100:]) / len(rows[-100:]) if rows else None,
            "success": None,
            "rewards": figures.thinned({"r": [row.reward for row in rows]}, figures.SPARKS)["r"],
            "tokens": tokens,
            "prompt_tokens": None,
            "cost": figures.cost_of(None, tokens, self._prices),
            "budget": None,
            "seconds": None,
            "inflight": sum(each["inflight"] or 0 for each in busy) if busy else None,
            "changed": None,
            "model": None,
            "tags": list(self.index.tags),
            "problems": len(self.problems()),
        }

    async def overview(self) -> dict[str, Any]:
        await self._read_settings()
        return {
            **await self.card(),
            "path": self.shown,
            "problem_lines": self.problems(),
            "views": ["overview", "live", "trajectories", "settings"],
            "settings": without_secrets(self._settings),
            "failures": (self._last or {}).get("failures", []),
            "curves": figures.batch_curves([]),
            "counts": (self._last or {}).get("counts"),
        }

    async def look(self) -> dict[str, Any]:
        """Workers and counts, at most once a second; empty if the store cannot be reached."""
        if self._last is not None and time.time() - self._last["now"] < 1.0:
            return self._last
        try:
            async with asyncio.timeout(2 * PATIENCE):
                self._last = await look_into(await self.store())
            self._problem = None
        except TimeoutError:
            self._problem = f"{self.shown}: does not answer"
        except RollwrightError as error:
            self._problem = scrubbed(str(error), self._address)
        if self._problem is not None:
            return {}
        return self._last or {}

    async def live_view(self) -> dict[str, Any]:
        seen = await self.look()
        return {
            "card": await self.card(),
            "state": (await self.card())["state"],
            "now": time.time(),
            "age": None,
            "snapshot": None,
            "last": None,
            "flow": None,
            "staleness": {},
            "failures": seen.get("failures", []),
            "activity": None,
            "verdict": None,
            "store": seen or None,
            "problem_lines": self.problems(),
        }

    async def _read_settings(self) -> None:
        if self._settings is not None or self._problem is not None:
            return
        try:
            found = await (await self.store()).get_latest_resources()
        except RollwrightError as error:
            self._problem = scrubbed(str(error), self._address)
            return
        settings = None if found is None else found.resources.get(CONFIG_KEY)
        if isinstance(settings, dict):
            self._settings = settings
            self.__dict__.pop("config", None)

    async def advance(self) -> bool:
        """Index further trajectories; returns whether there are more at hand."""
        try:
            await self._read_settings()
            store = await self.store()
            entries = await store.read_completions(self._cursor, limit=READ_AT_ONCE)
            if not entries:
                return False
            done = [each.rollout_id for each in entries if each.status is RolloutStatus.SUCCEEDED]
            encoded = await store.get_trajectories(done) if done else {}
        except RollwrightError as error:
            self._problem = scrubbed(str(error), self._address)
            return False
        self._missing += len(done) - len(encoded)
        await asyncio.to_thread(self._add, encoded)
        self._cursor = entries[-1].cursor
        return len(entries) == READ_AT_ONCE

    def _add(self, encoded: dict[str, bytes]) -> None:
        for content in encoded.values():
            try:
                self.index.add(Trajectory.outline(content))
            except FormatError as error:
                self._problem = f"{self.shown}: {error}"

    async def record(self, number: int) -> bytes:
        rollout_id = self.index.rows[number].rollout_id
        found = await (await self.store()).get_trajectories([rollout_id])
        if rollout_id not in found:
            raise FormatError(f"{rollout_id}: the store has its trajectory no more")
        return found[rollout_id]

    async def close(self) -> None:
        self.index.close()
        if self._store is not None:
            await self._store.close()
