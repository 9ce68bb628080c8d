"""`rollwright worker` and `rollwright serve`: the parts of a run that live in processes of their own."""

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollwright.addresses import redacted
from rollwright.agents import EpisodeFailure
from rollwright.cli.console import console, plain_lines, warn_of_password
from rollwright.cli.event_loop import run_async
from rollwright.http_server import raise_handle_limit
from rollwright.rollout import Activity
from rollwright.rollout.worker import WorkerSettings
from rollwright.run.gc_tuning import short_collections
from rollwright.run.playbook import load_function
from rollwright.run.worker_process import end_with_parent, run_worker
from rollwright.signals import INTERRUPTS
from rollwright.store.opening import ADDRESS_VARIABLE, TOKEN_VARIABLE, USUAL_PATIENCE, open_store
from rollwright.store.records import AttemptedRollout
from rollwright.trajectory import ErrorRecord

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
        typer.Option(help="A function of one's own that plays, as module:function.", show_default=False),
    ] = None,
    store_patience: Annotated[
        float,
        typer.Option(min=0, help="Seconds to go on trying a store that cannot be reached; then it ends."),
    ] = USUAL_PATIENCE,
    quiet: Annotated[bool, typer.Option(help="Do not say which rollouts are taken.")] = False,
    tied: Annotated[
        bool, typer.Option("--tied", help="End when standard input ends, as it does with a parent process.")
    ] = False,
) -> None:
    """Join a store from anywhere and play its rollouts. SIGTERM drains: what cannot be finished is handed back."""
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
        os.environ.pop(ADDRESS_VARIABLE, None)  # what is started from here has no use for it
        end_with_parent()

    async def work() -> Activity:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        with INTERRUPTS.answered_by(lambda: loop.call_soon_threadsafe(stop.set)):
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
    """Offer a store over HTTP. A token in ROLLWRIGHT_STORE_TOKEN is asked of everyone; off loopback it is needed."""
    run_async(_serve(store, host, port, socket_path, console()))


async def _serve(address: str, host: str, port: int, path: Path | None, screen: Console) -> None:
    from rollwright.store.http.server import StoreServer

    raise_handle_limit()
    store = await open_store(address)
    try:
        token = os.environ.get(TOKEN_VARIABLE)
        server = StoreServer(store, host=host, port=port, path=path, token=token, handle_signals=True)
        screen.print(f"serving {redacted(address)} at {server.url}", highlight=False, soft_wrap=True)
        with short_collections(whole=False):  # a store makes no cycles
            await server.run()
    finally:
        await store.close()
