"""`live.json` in a run's folder: what the run is doing now, for other processes to look at.

Invariants:
- The file is replaced atomically, and removed when the run ends in good order. One that stays behind names the process
  that wrote it, so a reader can tell a run at work from one that was killed.
- Writing takes at most `MOST_SHARE` of the run's time: the pause grows with the cost of the last snapshot.
- A snapshot that cannot be written never disturbs the run.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from rollwright.hardware import choose_batch
from rollwright.run.folder import RunFolder
from rollwright.run.statistics import activity_row, ledger_row

if TYPE_CHECKING:
    from rollwright.run.run import Run

_log = logging.getLogger(__name__)

LIVE = "live.json"

PAUSE = 0.5
"""Seconds between two snapshots: half of what a viewer needs to be at most two seconds behind."""

MOST_SHARE = 0.01
"""Share of the run's time that snapshots may take."""

MOST_EPISODES = 400
"""Episodes in a snapshot, those that have waited longest; all are counted by phase."""

MOST_REASONS = 50


def pause_after(seconds: float) -> float:
    """Seconds until the next snapshot, if the last one took so long."""
    return max(PAUSE, seconds / MOST_SHARE)


Describe = Callable[[], Mapping[str, Any]]


class LiveSnapshots:
    """`async with LiveSnapshots(folder, describe):` writes what `describe` returns, again and again."""

    def __init__(self, folder: RunFolder, describe: Describe) -> None:
        self._folder = folder
        self._file = folder.path / LIVE
        self._describe = describe
        self._began = time.time()
        self._written = 0
        self._took = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_writing(), name="live-snapshots")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._file.unlink(missing_ok=True)

    async def _keep_writing(self) -> None:
        while True:
            began = time.perf_counter()
            try:
                self._write()
            except OSError as error:  # a full disk stops the run where its own data is at stake, not here
                _log.info("%s: cannot be written: %s", self._file, error)
            self._took = time.perf_counter() - began
            await asyncio.sleep(pause_after(self._took))

    def _write(self) -> None:
        self._written += 1
        head = {
            "format": 1,
            "time": time.time(),
            "began": self._began,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "number": self._written,
            "took": self._took,
        }
        partial = self._file.with_name(f".{LIVE}.partial")
        partial.write_bytes(msgspec.json.encode(head | dict(self._describe())))
        partial.replace(self._file)
        self._folder.log.flush()  # so that finished episodes are seen before their batch is complete


def describe_run(run: "Run") -> dict[str, Any]:
    """Snapshot of the playing part of a run."""
    activity, ledger = run.activity, run.ledger
    reasons = sorted(ledger.reasons.items(), key=lambda each: -each[1])[:MOST_REASONS]
    return {
        "version": run.policy.version,
        "inflight": activity.inflight,
        "most_inflight": run.workers.most_inflight,
        "slots": _slots(run.config.policy),
        "waiting": {str(phase): count for phase, count in activity.waiting_on().items()},
        "episodes": activity.episodes(MOST_EPISODES),
        "activity": activity_row(activity),
        "ledger": ledger_row(ledger),
        "reasons": dict(reasons),
        "filters": {name: catch.count for name, catch in ledger.catches.by_filter.items()},
        "costs": run.costs.live(),
    }


def read_live(run: Path) -> dict[str, Any] | None:
    """The last snapshot; `None` if there is none, or it is damaged."""
    try:
        content = msgspec.json.decode((run / LIVE).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("time"), int | float) else None


def _slots(policy: object) -> int | None:
    """Concurrent calls of an engine in the worker's process; `None`: the settings do not say."""
    if (found := getattr(policy, "slots", None)) is not None:
        return int(found)
    batch = getattr(policy, "max_batch", None)
    return None if batch is None else choose_batch(batch)
