"""`rollwright worker`, `serve`, `enqueue`, `ps` and `cancel`: play a store's rollouts, offer a store over HTTP, and list,
enqueue and cancel rollouts.
"""

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollwright.addresses import redacted
from rollwright.cli.boxes import boxes_table
from rollwright.cli.console import (
    clock_time,
    complete_config,
    console,
    plain_lines,
    say_aside,
    warn_of_password,
)
from rollwright.cli.event_loop import run_async
from rollwright.errors import RollwrightError
from rollwright.http.server_limits import raise_handle_limit
from rollwright.rollout.accounting import FailureCauses
from rollwright.sandbox.leases import state_folder
from rollwright.signals import INTERRUPTS
from rollwright.store.api import Store
from rollwright.store.opening import ADDRESS_VARIABLE, TOKEN_VARIABLE, USUAL_PATIENCE, open_store
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRequest,
    RolloutConfig,
    RolloutStatus,
    WorkerRecord,
    WorkerStatus,
)
from rollwright.trajectory import ErrorRecord, Phase
from rollwright.ui.store_view import ENDED, LOST, heartbeat_age, worker_state

if TYPE_CHECKING:
    from rollwright.config import RunConfig
    from rollwright.rollout import Activity

OPEN = [RolloutStatus.QUEUING, RolloutStatus.PREPARING, RolloutStatus.RUNNING, RolloutStatus.REQUEUING]
"""Statuses that `ps` lists one by one."""

StoreOption = Annotated[
    str,
    typer.Option(
        help="A path, postgresql://… or http://…",
        envvar=ADDRESS_VARIABLE,
        show_default=False,
        callback=warn_of_password,
    ),
]


def worker(
    store: StoreOption,
    id: Annotated[str | None, typer.Option(help="Name of the worker. Default: host and process.")] = None,
    envs: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 16,
    max_rollouts: Annotated[int | None, typer.Option(min=1, help="End after so many rollouts.")] = None,
    poll_interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one call waits for a rollout.")
    ] = 30.0,
    heartbeat_interval: Annotated[float, typer.Option(min=0.05, help="Seconds between heartbeats.")] = 5.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Time to finish episodes after SIGTERM.")
    ] = 30.0,
    find_capacity: Annotated[
        bool, typer.Option(help="Find out how many episodes the engine can serve.")
    ] = True,
    agent: Annotated[
        str | None,
        typer.Option(help="Agent function that plays, as module:function.", show_default=False),
    ] = None,
    store_patience: Annotated[
        float,
        typer.Option(min=0, help="Seconds to retry an unreachable store before the worker ends."),
    ] = USUAL_PATIENCE,
    quiet: Annotated[bool, typer.Option(help="Do not print the claimed rollouts.")] = False,
    tied: Annotated[
        bool, typer.Option("--tied", help="End when standard input ends, as it does with a parent process.")
    ] = False,
) -> None:
    """Join a store from anywhere and play its rollouts. SIGTERM drains: unfinished rollouts are requeued."""
    from rollwright.agents import EpisodeFailure
    from rollwright.rollout.worker import WorkerSettings
    from rollwright.run.build_agents import load_function
    from rollwright.run.worker_process import end_with_parent, run_worker

    name = id or f"{socket.gethostname()}-{os.getpid()}"
    logging.basicConfig(level=logging.WARNING, format=f"{name}: %(message)s")
    say_line = plain_lines(console())

    def say(claimed: AttemptedRollout) -> None:
        say_line(f"{name} took {claimed.rollout_id}")

    def complain(claimed: AttemptedRollout, error: ErrorRecord) -> None:
        say_line(f"{name} failed at {claimed.rollout_id}: {EpisodeFailure(error)}")

    settings = WorkerSettings(
        max_env_num_per_worker=envs,
        max_rollouts=max_rollouts,
        poll_interval=poll_interval,
        heartbeat_interval=heartbeat_interval,
        drain_seconds=drain_seconds,
        find_capacity=find_capacity,
    )
    function = load_function(agent) if agent else None
    if tied:
        os.environ.pop(ADDRESS_VARIABLE, None)  # child processes must not inherit the address
        end_with_parent()

    async def work() -> "Activity":
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        with INTERRUPTS.handled_by(lambda: loop.call_soon_threadsafe(stop.set)):
            return await run_worker(
                store,
                name,
                settings,
                function=function,
                on_claim=None if quiet else say,
                on_failed=None if quiet else complain,
                stop=stop,
                patience=store_patience,
                on_outage=None if quiet else say_line,
                ask_engines=not tied,
            )

    done = run_async(work())
    if not quiet:
        say_line(f"{name} played {done.finished} rollouts, {done.tokens:,} tokens sampled")


def serve(
    store: StoreOption,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8700,
    socket_path: Annotated[
        Path | None, typer.Option("--socket", help="Unix socket instead of a port.")
    ] = None,
) -> None:
    """Offer a store over HTTP. A token in ROLLWRIGHT_STORE_TOKEN is required of every client; off loopback it must be set."""
    run_async(_serve(store, host, port, socket_path, console()))


async def _serve(address: str, host: str, port: int, path: Path | None, screen: Console) -> None:
    from rollwright.run.gc_tuning import short_collections
    from rollwright.store.http.server import StoreServer

    raise_handle_limit()
    store = await open_store(address)
    try:
        token = os.environ.get(TOKEN_VARIABLE)
        server = StoreServer(store, host=host, port=port, path=path, token=token, handle_signals=True)
        screen.print(f"serving {redacted(address)} at {server.url}", highlight=False, soft_wrap=True)
        with short_collections(whole=False):  # a store creates no reference cycles
            await server.run()
    finally:
        await store.close()


def enqueue(
    tasks: Annotated[
        Path, typer.Argument(help="JSON lines: one rollout's input each; `-` for standard input.")
    ],
    store: StoreOption,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with policy, sampling and limits.", autocompletion=complete_config),
    ] = None,
    max_attempts: Annotated[int, typer.Option(min=1)] = 3,
    priority: Annotated[int, typer.Option(help="Higher is taken first.")] = 0,
) -> None:
    """Put rollouts in a store, for workers to play: tasks for an agent function, or episodes."""
    from rollwright.config import load

    source = "standard input" if str(tasks) == "-" else str(tasks)
    text = typer.get_text_stream("stdin").read() if str(tasks) == "-" else _read(tasks)
    inputs = [
        _parsed(source, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()
    ]
    settings = load(config) if config else None
    rules = RolloutConfig(max_attempts=max_attempts)
    if settings is not None:
        rules = msgspec.structs.replace(rules, unresponsive_seconds=settings.limits.lease_seconds)
    run_async(_enqueue(store, inputs, settings, rules, priority))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise RollwrightError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RollwrightError(f"{file}: is not UTF-8 text") from error


def _parsed(source: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RollwrightError(f"{source}, line {number}: is not JSON: {error.msg}") from error


async def _enqueue(
    address: str, inputs: list[Any], settings: "RunConfig | None", rules: RolloutConfig, priority: int
) -> None:
    from rollwright.run.worker_settings import CONFIG_KEY

    store = await open_store(address, on_outage=say_aside)
    try:
        resources_id = None
        if settings is not None:
            resources_id = settings.name
            wanted = {CONFIG_KEY: settings.model_dump(mode="json")}
            if await store.get_resources_by_id(resources_id) is None:
                await store.add_resources(wanted, resources_id=resources_id)
            else:
                await store.update_resources(resources_id, wanted)
        requests = [
            EnqueueRequest(input=each, resources_id=resources_id, config=rules, priority=priority)
            for each in inputs
        ]
        for rollout in await store.enqueue_many_rollouts(requests):
            typer.echo(rollout.rollout_id)
    finally:
        await store.close()


def ps(
    store: Annotated[
        str | None,
        typer.Option(
            help="A path, postgresql://… or http://…",
            envvar=ADDRESS_VARIABLE,
            show_default=False,
            callback=warn_of_password,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Open rollouts to list.")] = 20,
    boxes: Annotated[
        bool, typer.Option("--boxes", help="Only this machine's boxes; needs no store.")
    ] = False,
) -> None:
    """Show a store's rollouts and workers, what each is waiting for, and this machine's boxes."""
    if store is None and not boxes:
        raise typer.BadParameter("give the store's address, or --boxes", param_hint="--store")
    if store is not None and not boxes:
        run_async(_ps(store, limit, console()))
    if (table := boxes_table(state_folder())) is not None:
        console().print(table)
    elif boxes:
        console().print("no boxes on this machine", highlight=False)


async def _ps(address: str, limit: int, screen: Console) -> None:
    store = await open_store(address, must_exist=True, on_outage=say_aside)
    try:
        screen.print(_counts(await store.statistics()), highlight=False)
        screen.print(await _workers(store))
        screen.print(await _rollouts(store, limit))
        if (failed := await _failures(store, limit)) is not None:
            screen.print(failed)
    finally:
        await store.close()


def _counts(statistics: Mapping[str, int]) -> str:
    """Counts by status; a claimed rollout counts as running, whether it has recorded a turn or not."""
    preparing, running = (statistics[each] for each in (RolloutStatus.PREPARING, RolloutStatus.RUNNING))
    said = []
    for status in RolloutStatus:
        if status is RolloutStatus.RUNNING:
            without = f" ({preparing:,} without a turn yet)" if preparing else ""
            said.append(f"{status} {preparing + running:,}{without}")
        elif status is not RolloutStatus.PREPARING:
            said.append(f"{status} {statistics[status]:,}")
    return "  ".join(said)


async def _workers(store: Store) -> Table:
    table = Table(title="workers", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("worker", "state", "last seen", "playing", "waiting for", "turns", "tokens"):
        table.add_column(name)
    now = time.time()
    for worker in await store.query_workers():
        stats = worker.heartbeat_stats
        playing, turns, tokens = (str(stats.get(key, "–")) for key in ("inflight", "turns", "tokens"))
        state = worker_state(worker, now)
        if state != WorkerStatus.BUSY:
            playing = "–"  # its last heartbeat may be older than its death
        seen = "never" if (age := heartbeat_age(worker, now)) is None else f"{clock_time(age)} ago"
        style = "red" if state == LOST else "dim" if state == ENDED else ""
        waits = Text(_waits_for(worker, state, age))
        table.add_row(worker.worker_id, state, seen, playing, waits, turns, tokens, style=style)
    return table


def _waits_for(worker: WorkerRecord, state: str, age: float | None) -> str:
    stats = worker.heartbeat_stats
    if state == LOST:
        holds = (
            "another worker gets its rollouts when their leases end"
            if worker.current_rollout_id
            else "dead or cut off"
        )
        return f"no heartbeat for {clock_time(age)}: {holds}" if age is not None else "no heartbeat yet"
    if state == ENDED:
        return "–"
    phases = [f"{stats[phase]} {phase}" for phase in Phase if stats.get(phase)]
    if worker.status is WorkerStatus.IDLE:
        phases = ["rollouts"]
    return str(stats.get("waiting") or " · ".join(phases) or "–")


async def _rollouts(store: Store, limit: int) -> Table:
    page = await store.query_rollouts(status=OPEN, limit=limit)
    table = Table(title=f"open rollouts: {page.total:,}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("rollout", "state", "attempt", "worker", "why the last one ended"):
        table.add_column(name, no_wrap=name == "rollout")
    for rollout in page:
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        held_by = "–" if attempt is None else attempt.worker_id or "–"
        why = "–" if attempt is None else attempt.reason or "–"
        table.add_row(rollout.rollout_id, _state(rollout.status), _tries(attempt), held_by, Text(why))
    return table


def _state(status: RolloutStatus) -> str:
    """Shown status: a claimed rollout is running, because an agent may work long before its first turn."""
    return f"{RolloutStatus.RUNNING}, no turn yet" if status is RolloutStatus.PREPARING else str(status)


def _tries(attempt: Attempt | None) -> str:
    if attempt is None:
        return "–"
    under_way = attempt.status in (AttemptStatus.PREPARING, AttemptStatus.RUNNING)
    return f"{attempt.sequence_id} ({'under way' if under_way else attempt.status})"


async def _failures(store: Store, limit: int) -> Table | None:
    """Causes of permanent failures; only of the last ones if there are many."""
    page = await store.query_rollouts(
        status=RolloutStatus.FAILED, sort_by="end_time", sort_order="desc", limit=max(limit, FAILURES_READ)
    )
    if not page.items:
        return None
    causes = FailureCauses()
    for rollout in page:
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        causes.add((attempt and attempt.reason) or "no reason was given", rollout.rollout_id)
    of = "" if page.total == len(page.items) else f", of the last {len(page.items):,}"
    table = Table(title=f"failed rollouts: {page.total:,}{of}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("count", "why", "for example"):
        table.add_column(name, no_wrap=name == "for example")
    for cause in causes.most_common(limit):
        table.add_row(f"{cause.count:,}", Text(cause.text), cause.example)
    return table


FAILURES_READ = 100
"""Failed rollouts whose reasons are read: enough to show the causes, few enough to be quick."""


def cancel(
    rollouts: Annotated[list[str], typer.Argument(help="Rollout ids.", show_default=False)],
    store: StoreOption,
    reason: Annotated[str, typer.Option()] = "cancelled by hand",
) -> None:
    """Withdraw rollouts; a worker that plays one stops."""
    gone = run_async(_cancel(store, rollouts, reason))
    console().print(f"cancelled {len(gone)} of {len(rollouts)}", highlight=False)


async def _cancel(address: str, rollouts: list[str], reason: str) -> list[str]:
    store = await open_store(address, must_exist=True, on_outage=say_aside)
    try:
        return await store.cancel_rollouts(rollouts, reason)
    finally:
        await store.close()
