"""The end of a run: its summary, computed from the run folder and written whichever way the run ends.

Invariants:
- `conclude` writes `summary.json` after success, cancellation and errors alike. The summary says whether the run was
  interrupted, and which error ended it. Only a full disk may leave a failed run without one.
- Cancelling the task that runs `conclude` is an orderly interruption: the call returns the summary.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from typing import Any

import msgspec

from rollwright.errors import RollwrightError
from rollwright.rollout.accounting import FailureCauses
from rollwright.rollout.scheduler import FOREIGN_CANCELLATION
from rollwright.run.costs import BudgetReached
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.reference_scores import baseline
from rollwright.run.run import Run
from rollwright.run.statistics import RunStatistics, TreeSums, ViewSizes, activity_row, ledger_row
from rollwright.signals import INTERRUPTS


async def conclude(
    work: Coroutine[Any, Any, None], folder: RunFolder, describe: Callable[[float], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Run `work` to its end, write the summary into the folder, and return it.

    `describe` gets the seconds that `work` took, and returns the summary without the reason of the end.
    """
    started = time.monotonic()
    interrupted = False
    failure: Exception | None = None
    stopped: str | None = None
    try:
        await work
    except BudgetReached as error:
        stopped = str(error)
    except asyncio.CancelledError:
        interrupted = True
        _absorb_cancellation()
    except Exception as error:
        failure = error
        raise
    finally:
        with _full_disk_ignored_after(failure):
            summary = await describe(time.monotonic() - started)
            summary["interrupted"] = interrupted or stopped is not None
            summary["stopped"] = stopped
            summary["error"] = None if failure is None else str(failure)
            folder.finish(summary)
    return summary


def _absorb_cancellation() -> None:
    """Clear the current task's cancellation, so that the summary can be written; raises if no signal has asked for it
    in a process whose signals are handled here, because code of an episode has cancelled the run then."""
    if INTERRUPTS.installed and INTERRUPTS.received is None:
        raise RollwrightError(f"the command was ended by {FOREIGN_CANCELLATION}")
    task = asyncio.current_task()
    while task is not None and task.uncancel():
        pass


def _full_disk_ignored_after(failure: Exception | None) -> AbstractContextManager[None]:
    """A disk without room for the summary must not hide the error that ended the run."""
    return nullcontext() if failure is None else suppress(OSError)


async def summarize(run: Run, folder: RunFolder, seconds: float) -> dict[str, Any]:
    """Results by mode and tag with random and perfect play beside them, and the fate of every rollout."""
    statistics, views, trees = RunStatistics(), ViewSizes(), TreeSums()
    reader = RunReader(folder.path)
    modes = {group: row["mode"] for row in reader.metrics() for group in row["groups"]}
    for trajectory in folder.trajectories():
        mode = modes.get(trajectory.group_id)
        if mode is not None:
            statistics.add(mode, [trajectory])
        if mode == "train":
            views.add(trajectory)
            trees.add(trajectory)
    baselines = {
        (mode, tag): await baseline(tag, list(played.levels), run.config.seed, run.settings)
        for (mode, tag), played in statistics.tags.items()
    }
    ledger = run.ledger
    return {
        "name": run.config.name,
        "simulated": run.config.plays_simulated,
        "seconds": round(seconds, 3),
        "results": statistics.rows(baselines),
        "ledger": ledger_row(ledger),
        "reasons": ledger.reasons,
        "failures": failure_causes(reader).rows(),
        "filters": {name: asdict(catch) for name, catch in ledger.catches.by_filter.items()},
        "views": views.row(),
        "trees": trees.row(),
        "activity": activity_row(run.activity),
        "costs": run.costs.live() | run.costs.ledger.sums(run.costs.prices),
        "engine": None if run.capabilities is None else msgspec.to_builtins(run.capabilities),
    }


def failure_causes(reader: RunReader) -> FailureCauses:
    """Causes of the permanent failures of a whole run."""
    causes = FailureCauses()
    for row in reader.failures():
        causes.add(row["reason"], row["rollout_id"])
    return causes
