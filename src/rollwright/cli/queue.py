"""`rollwright enqueue`, `ps` and `cancel`: a look into a store, and a hand in it."""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollwright.cli.console import console, say_aside
from rollwright.cli.event_loop import run_async
from rollwright.cli.workers import StoreOption
from rollwright.config import RunConfig, load
from rollwright.errors import RollwrightError
from rollwright.run.playbook import CONFIG_KEY
from rollwright.store.contract import Store
from rollwright.store.opening import open_store
from rollwright.store.records import EnqueueRequest, RolloutConfig, RolloutStatus, Worker, WorkerStatus

OPEN = [RolloutStatus.QUEUING, RolloutStatus.PREPARING, RolloutStatus.RUNNING, RolloutStatus.REQUEUING]


def enqueue(
    tasks: Annotated[
        Path, typer.Argument(help="JSON lines: one rollout's input each; `-` for standard input.")
    ],
    store: StoreOption,
    config: Annotated[Path | None, typer.Option(help="YAML file with policy, sampling and limits.")] = None,
    max_attempts: Annotated[int, typer.Option(min=1)] = 3,
    priority: Annotated[int, typer.Option(help="Higher is taken first.")] = 0,
) -> None:
    """Put rollouts in a store, for workers to play: tasks for a function of one's own, or episodes."""
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
    except (OSError, UnicodeDecodeError) as error:
        raise RollwrightError(f"{file}: cannot be read: {error}") from error


def _parsed(source: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RollwrightError(f"{source}, line {number}: is not JSON: {error.msg}") from error


async def _enqueue(
    address: str, inputs: list[Any], settings: RunConfig | None, rules: RolloutConfig, priority: int
) -> None:
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
    store: StoreOption,
    limit: Annotated[int, typer.Option(min=1, help="Open rollouts to list.")] = 20,
) -> None:
    """Show a store's rollouts and workers, and what each is waiting for."""
    run_async(_ps(store, limit, console()))


async def _ps(address: str, limit: int, screen: Console) -> None:
    store = await open_store(address, must_exist=True, on_outage=say_aside)
    try:
        statistics = await store.statistics()
        counts = "  ".join(f"{status} {statistics[status]:,}" for status in RolloutStatus)
        screen.print(counts, highlight=False)
        screen.print(await _workers(store))
        screen.print(await _rollouts(store, limit))
    finally:
        await store.close()


async def _workers(store: Store) -> Table:
    table = Table(title="workers", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("worker", "status", "playing", "waiting for", "turns", "tokens"):
        table.add_column(name)
    for worker in await store.query_workers():
        stats = worker.heartbeat_stats
        playing, turns, tokens = (str(stats.get(key, "–")) for key in ("inflight", "turns", "tokens"))
        if worker.status is not WorkerStatus.BUSY:
            playing = "–"  # what it told last, it may have told before it died
        table.add_row(worker.worker_id, str(worker.status), playing, _waits_for(worker), turns, tokens)
    return table


def _waits_for(worker: Worker) -> str:
    stats = worker.heartbeat_stats
    if worker.status is WorkerStatus.UNKNOWN:
        return "not heard of lately"
    phases = [f"{stats[phase]} {phase}" for phase in ("engine", "environment", "store") if stats.get(phase)]
    if worker.status is WorkerStatus.IDLE:
        phases = ["rollouts"]
    return str(stats.get("waiting") or " · ".join(phases) or "–")


async def _rollouts(store: Store, limit: int) -> Table:
    page = await store.query_rollouts(status=OPEN, limit=limit)
    table = Table(title=f"open rollouts: {page.total:,}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("rollout", "status", "attempt", "worker", "why it ended"):
        table.add_column(name, no_wrap=name == "rollout")
    for rollout in page:
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        tries = "–" if attempt is None else f"{attempt.sequence_id} ({attempt.status})"
        held_by = "–" if attempt is None else attempt.worker_id or "–"
        why = "–" if attempt is None else attempt.reason or "–"
        table.add_row(rollout.rollout_id, str(rollout.status), tries, held_by, Text(why))
    return table


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
