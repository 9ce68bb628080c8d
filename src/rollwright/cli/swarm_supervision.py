"""`rollwright swarm run` and `rollwright swarm status`: a node that is kept at work, and how it does."""

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from rollwright.cli.console import console
from rollwright.cli.swarm import HOMES, SHIPPED, Home, Overrides, node_settings
from rollwright.config import RunConfig
from rollwright.run.folder import CONFIG, RunReader
from rollwright.run.model_choice import smaller_models
from rollwright.run.retention import read_forgotten
from rollwright.swarm.heartbeat import Heartbeat, NodeStatus, read_heartbeat, read_status
from rollwright.swarm.identity import refuse_open_folder
from rollwright.swarm.supervisor.logs import NodeLogs
from rollwright.swarm.supervisor.oom_fallbacks import oom_fallbacks
from rollwright.swarm.supervisor.record import SupervisorRecord, is_supervised, read_record
from rollwright.swarm.supervisor.rules import RestartRules, WatchRules
from rollwright.swarm.supervisor.supervisor import LOGS, Supervision, Supervisor

NOT_AT_WORK = 3
"""Exit code of `status` for a node that nobody keeps at work; 1 and 2 mean that something is wrong."""

LAST_ROUNDS, LAST_DEATHS = 5, 3


def register(app: typer.Typer) -> None:
    """Adds the commands to those of `rollwright swarm`."""
    app.command("run")(run)
    app.command("status")(status)


def run(
    config: Annotated[
        Path | None,
        typer.Argument(help="As of `rollwright swarm join`, which this keeps at work.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    home: Home = None,
    hang_seconds: Annotated[
        float, typer.Option(min=1, help="Without progress for so long, the node is started again.")
    ] = WatchRules.hang_seconds,
    max_fruitless: Annotated[
        int, typer.Option(min=1, help="Deaths in a row without a finished round after which this gives up.")
    ] = RestartRules.max_fruitless,
    quiet: Annotated[bool, typer.Option(help="Say nothing here; the logs tell it all.")] = False,
) -> None:
    """Join a swarm and stay: a node that dies or hangs is started again and goes on. One command, no questions asked."""
    changes = list(overrides or [])
    settings, place = node_settings(config, list(changes), home)  # what is wrong shows before anything starts
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
    """Of the pool; none where rounds are done, because what was learnt belongs to its model."""
    beat = read_heartbeat(home)
    if beat is not None and beat.rounds_done:
        return []
    return smaller_models(settings)[1:]


def _echo(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def status(
    home: Annotated[Path, typer.Argument(help="The node's folder.")] = HOMES / Path(SHIPPED).stem,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show how the node in HOME does: peers, rounds, rewards, what was accepted and refused and why, restarts.

    Exit code 0: it is kept at work; 3: it is not.
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
        _show(home, kept, record, beat, node)
    if not kept:
        raise typer.Exit(NOT_AT_WORK)


def _show(
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
        table.add_row("", Text("nothing was run here yet; start with `rollwright swarm run`"))
    screen.print(table)


def _state(kept: bool, record: SupervisorRecord | None) -> Text:
    if kept and record is not None:
        return Text(f"{record.state}: {record.reason} (supervisor {record.pid}, node {record.node_pid})")
    return Text("nobody keeps it at work" + (f"; the last time: {record.reason}" if record else ""))


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
