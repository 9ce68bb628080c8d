"""A worker as a process of its own: opens the store by its address and plays until it is asked to stop.

SIGTERM and SIGINT drain it: it claims no more rollouts, finishes those that it can, requeues the rest, and exits with 0.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable

from rollwright.rollout import Activity, AgentFunction, InflightLimit, RolloutContext
from rollwright.rollout.concurrency import START
from rollwright.rollout.worker import RolloutWorker, WorkerSettings
from rollwright.run.build import make_env
from rollwright.run.gc_tuning import rare_collections
from rollwright.run.worker_settings import StoreSettingsSource
from rollwright.store.opening import USUAL_PATIENCE, open_store
from rollwright.store.records import AttemptedRollout
from rollwright.trajectory import ErrorRecord


async def run_worker(
    address: str,
    worker_id: str,
    settings: WorkerSettings,
    *,
    function: AgentFunction | None = None,
    on_claim: Callable[[AttemptedRollout], None] | None = None,
    on_failed: Callable[[AttemptedRollout, ErrorRecord], None] | None = None,
    stop: asyncio.Event | None = None,
    patience: float = USUAL_PATIENCE,
    on_outage: Callable[[str], None] | None = None,
    ask_engines: bool = False,
) -> Activity:
    """Play rollouts of the store at `address`; returns the worker's counters.

    Args:
        stop: Drains the worker, like a signal.
        patience: Seconds without a reachable store until an error is raised; `on_outage` gets a line meanwhile.
        ask_engines: Whether to probe the engines of the waiting rollouts first; a run has probed them for its workers.
    """
    store = await open_store(address, must_exist=True, patience=patience, on_outage=on_outage)
    activity = Activity()
    settings_source = StoreSettingsSource(store, function)
    limit = START if settings.find_capacity else settings.max_env_num_per_worker
    context = RolloutContext(
        store, settings_source, make_env, InflightLimit(limit), activity, on_failed=on_failed
    )
    worker = RolloutWorker(
        context, worker_id, settings, pressure=lambda: settings_source.pressure, on_claim=on_claim
    )
    stopped = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    if stop is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
    try:
        if ask_engines:
            await settings_source.ask_engines()
        with rare_collections():
            working = asyncio.create_task(worker.run())
            stopping = asyncio.create_task(stopped.wait())
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await worker.drain()
            stopping.cancel()
            await working
    finally:
        await settings_source.close()
        await store.close()
    return activity


def end_with_parent() -> None:
    """Exit this process as soon as its parent closes the other end of standard input.

    Without draining: the store may be gone together with the parent, and other workers claim the rollouts when their
    leases end. In a thread, because an environment may block the event loop.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
