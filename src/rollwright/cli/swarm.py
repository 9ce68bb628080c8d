"""`rollwright swarm`: machines that do not trust each other train together by sharing rollouts.

`join` runs one node, `run` supervises it, `status` shows its state, `identity` its name among its peers.
"""

import sys
import time
from datetime import timedelta
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollwright.cli.console import RUNS, Overrides, complete_config, console, plain_lines, warn_of_password
from rollwright.cli.event_loop import run_async
from rollwright.config import RunConfig, build, load
from rollwright.run.folder import CONFIG, RunReader
from rollwright.run.retention import read_forgotten
from rollwright.signals import INTERRUPTS, SignalReceived
from rollwright.swarm.heartbeat import Heartbeat, NodeStatus, read_heartbeat, read_status
from rollwright.swarm.identity import IDENTITY_FILE, load_identity, refuse_open_folder, short_name
from rollwright.swarm.supervisor.logs import NodeLogs
from rollwright.swarm.supervisor.oom_fallbacks import oom_fallbacks
from rollwright.swarm.supervisor.record import SupervisorRecord, is_supervised, read_record
from rollwright.swarm.supervisor.rules import RestartRules, WatchRules
from rollwright.swarm.supervisor.supervisor import LOGS, Supervision, Supervisor

app = typer.Typer(
    help="Train together with other machines by sharing rollouts.", no_args_is_help=True, add_completion=False
)

SHIPPED = "shipped/swarm.yaml"
"""Default configuration of a node, in the package `rollwright.config`."""

NOT_AT_WORK = 3
"""Exit code of `status` for a node without a supervisor; 1 and 2 mean errors."""

LAST_ROUNDS, LAST_DEATHS = 5, 3

FOLLOWS = ("seed", "rollout_batch_size")
"""Settings of a node's run that derive from its key and its swarm, and are not read back when it resumes."""

Home = Annotated[
    Path | None, typer.Option(help="The node's folder. Default: runs/NAME. An existing one is resumed.")
]


@app.callback()
def swarm() -> None:
    """Train together with other machines by sharing rollouts."""


@app.command()
def join(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file with a `swarm` part. Default: what the home was made with, or puzzles with a small model.",
            show_default=False,
            autocompletion=complete_config,
        ),
    ] = None,
    overrides: Overrides = None,
    home: Home = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where rollouts are kept. Default: in the home.",
            show_default=False,
            callback=warn_of_password,
        ),
    ] = None,
) -> None:
    """Join a swarm: rounds of generate, share, sample, train, evaluate. Ctrl-C ends cleanly, a crash costs nothing but
    time: the same command resumes."""
    settings, place = node_settings(config, list(overrides or []), home)
    from rollwright.run.checks import probe_engines
    from rollwright.run.model_choice import load_settled
    from rollwright.run.statistics import batch_row

    screen = console()
    _fetch_model(settings, screen)
    run_async(probe_engines(settings))
    from rollwright.run.swarm_node import SwarmNode

    def make(settled: RunConfig) -> SwarmNode:
        return SwarmNode(
            settled, place, store=store, row=batch_row, on_round=lambda each: _show_round(each, screen)
        )

    _, node = load_settled(settings, make, home=place, say=plain_lines(screen))
    me = short_name(node.identity.peer)
    screen.print(f"{me} joins `{node.swarm.name}`; home: {place}", highlight=False, soft_wrap=True)
    try:
        run_async(node.run())
    except SignalReceived:
        screen.print(
            f"stopped after {node.training.pipeline.done:,} rounds; the same command resumes", highlight=False
        )
        raise typer.Exit(INTERRUPTS.exit_code) from None
    screen.print(f"done; the model is in {place / 'model'}", highlight=False, soft_wrap=True)


@app.command()
def identity(
    home: Annotated[Path, typer.Argument(help="The node's folder; a new identity is made if it has none.")],
) -> None:
    """Show the name of the node in HOME among its peers."""
    peer = load_identity(home / IDENTITY_FILE).peer
    console().print(f"{short_name(peer)}  {peer}", highlight=False, soft_wrap=True)


def node_settings(config: Path | None, changes: list[str], home: Path | None) -> tuple[RunConfig, Path]:
    """The settings of a node, and its home."""
    if config is not None and "=" in str(config) and not config.is_file():
        changes.insert(0, str(config))  # without a file, the first setting is in its place
        config = None
    if config is not None:
        settings = load(config, changes)
        return settings, home or RUNS / settings.name
    place = home or RUNS / Path(SHIPPED).stem
    if (place / CONFIG).is_file():
        content: dict[str, Any] = yaml.safe_load((place / CONFIG).read_text(encoding="utf-8"))
        chosen = {key: value for key, value in content.items() if key not in FOLLOWS}
        return build(chosen, changes, source=str(place / CONFIG)), place
    with as_file(files("rollwright.config") / SHIPPED) as shipped:
        return load(shipped, changes), place


def _fetch_model(settings: RunConfig, screen: Console) -> None:
    """Fetch a model of the catalogue that is not on this machine."""
    from rollwright.models.catalogue import CATALOGUE, is_fetched
    from rollwright.models.fetching import fetch

    name = str(getattr(settings.policy, "model", ""))
    if name in CATALOGUE and not is_fetched(name):
        screen.print(f"fetching {CATALOGUE[name].title} ({CATALOGUE[name].megabytes} MB)", highlight=False)
        fetch(name)


def _show_round(status: NodeStatus, screen: Console) -> None:
    """Print one line for the last round."""
    if not status.rounds:
        return
    last = status.rounds[-1]
    parts = [f"round {last.round}"]
    parts += [] if last.reward is None else [f"reward {last.reward:.3f}"]
    parts.append(f"{last.own_groups} own + {last.foreign_groups} foreign groups")
    peers = sum(each.alive for each in status.peers)
    parts.append(f"{peers} peer" if peers == 1 else f"{peers} peers")
    parts += [] if last.evaluation is None else [f"evaluation {last.evaluation:.3f}"]
    parts += [f"{len(status.quarantined)} in quarantine"] if status.quarantined else []
    screen.print(" · ".join(parts), highlight=False, soft_wrap=True)


@app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Argument(help="As of `rollwright swarm join`, which this supervises.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    home: Home = None,
    hang_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds without progress after which the node is restarted.")
    ] = WatchRules.hang_seconds,
    max_fruitless: Annotated[
        int, typer.Option(min=1, help="Deaths in a row without a finished round after which this gives up.")
    ] = RestartRules.max_fruitless,
    quiet: Annotated[bool, typer.Option(help="Print nothing; see the logs.")] = False,
) -> None:
    """Join a swarm and stay: a node that dies or hangs is restarted and resumes."""
    changes = list(overrides or [])
    settings, place = node_settings(config, list(changes), home)  # raises errors before anything starts
    refuse_open_folder(place)
    words = [sys.executable, "-m", "rollwright", "swarm", "join"]
    words += [str(config)] if config is not None else []
    words += [*changes, "--home", str(place)]
    logs = NodeLogs(place / LOGS, echo=None if quiet else _echo)
    if not quiet:
        typer.echo(f"logs: {logs.readable} (tail -f), {logs.events}; status: rollwright swarm status {place}")
    supervision = Supervision(
        command=words,
        home=place,
        oom_fallbacks=oom_fallbacks(settings, _smaller_models(settings, place)),
        restarts=RestartRules(max_fruitless=max_fruitless),
        watching=WatchRules(hang_seconds=hang_seconds),
    )
    code = Supervisor(supervision, logs).run()
    if code:
        raise typer.Exit(code)


def _smaller_models(settings: RunConfig, home: Path) -> list[str]:
    """Smaller models of the pool; none once a round is done, because the learned weights belong to their model."""
    from rollwright.run.model_choice import smaller_models

    beat = read_heartbeat(home)
    if beat is not None and beat.rounds_done:
        return []
    return smaller_models(settings)[1:]


def _echo(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@app.command()
def status(
    home: Annotated[Path, typer.Argument(help="The node's folder.")] = RUNS / Path(SHIPPED).stem,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the state of the node in HOME: peers, rounds, rewards, accepted and refused groups with reasons, restarts.

    Exit code 0: it is supervised; 3: it is not.
    """
    kept = is_supervised(home)
    record, beat, node = read_record(home), read_heartbeat(home), read_status(home)
    if as_json:
        content: dict[str, Any] = {
            "home": str(home),
            "at_work": kept,
            "supervisor": msgspec.to_builtins(record),
            "heartbeat": msgspec.to_builtins(beat),
            "node": msgspec.to_builtins(node),
            "forgotten_steps": read_forgotten(home).steps,
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
    else:
        _show_status(home, kept, record, beat, node)
    if not kept:
        raise typer.Exit(NOT_AT_WORK)


def _show_status(
    home: Path, kept: bool, record: SupervisorRecord | None, beat: Heartbeat | None, node: NodeStatus | None
) -> None:
    screen = console()
    table = Table(title=f"node {node.name if node else home.name}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("state", _state(kept, record))
    if record is not None:
        ends = ", ".join(f"{count} {ending}" for ending, count in record.endings.items())
        table.add_row(
            "restarts", f"{max(0, record.starts - 1)}" + (f" (ends so far: {ends})" if ends else "")
        )
        if record.oom_fallbacks:
            table.add_row("made smaller", ", ".join(record.oom_fallbacks))
        for death in record.last[-LAST_DEATHS:]:
            table.add_row(f"  {_ago(death.time)}", Text(death.reason))
    if beat is not None:
        table.add_row(
            "last progress",
            f"{_ago(beat.time)}: round {beat.round}, phase {beat.phase}, {beat.rounds_done} rounds done",
        )
    if node is not None:
        _add_node(table, node)
    if (home / CONFIG).is_file() and (shown := RunReader(home).shown_steps()) is not None:
        table.add_row("kept", shown)
    if record is None and beat is None and node is None:
        table.add_row("", Text("no node was started here yet; start with `rollwright swarm run`"))
    screen.print(table)


def _state(kept: bool, record: SupervisorRecord | None) -> Text:
    if kept and record is not None:
        return Text(f"{record.state}: {record.reason} (supervisor {record.pid}, node {record.node_pid})")
    return Text("it is not supervised" + (f"; the last time: {record.reason}" if record else ""))


def _add_node(table: Table, node: NodeStatus) -> None:
    alive = [each for each in node.peers if each.alive]
    table.add_row("swarm", f"{node.swarm}, weights of version {node.version}")
    known = ", ".join(f"{each.name} (round {each.round})" for each in alive)
    strangers = f"; {node.strangers} more have signed nothing yet" if node.strangers else ""
    shown = f": {known}" if known else ""
    table.add_row("peers", f"{len(alive)} of {len(node.peers)} alive{shown}{strangers}")
    for each in node.rounds[-LAST_ROUNDS:]:
        parts = [f"{each.own_groups} own + {each.foreign_groups} foreign groups"]
        parts += [] if each.reward is None else [f"reward {each.reward:.3f}"]
        parts += [] if each.evaluation is None else [f"evaluation {each.evaluation:.3f}"]
        table.add_row(f"round {each.round}", ", ".join(parts))
    table.add_row("groups", f"{node.shared} shared, {node.accepted} accepted from peers")
    refused = ", ".join(f"{count} {reason}" for reason, count in sorted(node.refused.items()))
    table.add_row("refused", refused or "none")
    if node.quarantined:
        table.add_row("in quarantine", ", ".join(node.quarantined))


def _ago(moment: float) -> str:
    return f"{timedelta(seconds=max(0, round(time.time() - moment)))} ago"
