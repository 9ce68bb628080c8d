"""The `rollwright` command: its subcommands, its exit codes, and errors as one line.

A user's mistake ends with one line on standard error and exit code 2; an unusable engine with 1; Ctrl-C with 130, SIGTERM
with 143; lack of memory with 137. A traceback means a defect of rollwright.

Invariant: a subcommand's module is imported only when that subcommand is called; `--help`, `--version` and shell completion
need only the table below.
"""

import sys
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rollwright import __version__
from rollwright.errors import RollwrightError
from rollwright.signals import INTERRUPTS, SignalReceived

OUT_OF_MEMORY = 137
"""Exit code of a process that the kernel kills for lack of memory, so that a supervisor treats both alike."""

LESS_MEMORY = "make training.tokens_per_micro_batch or policy.max_batch smaller, or choose a smaller model"


class Command(NamedTuple):
    """A subcommand before it is imported."""

    module: str
    """Module in `rollwright.cli`."""
    name: str
    """Name in the module: a function, or a Typer app with subcommands."""
    help: str
    """First sentence of its help page; a test compares them."""


COMMANDS = {
    "run": Command("run", "run", "Play the episodes that CONFIG asks for."),
    "resume": Command("run", "resume", "Resume RUN where it stopped."),
    "train": Command("train", "train", "Train as CONFIG says."),
    "serve-batches": Command(
        "train",
        "serve_batches",
        "Play as CONFIG says, and offer the batches over HTTP to a trainer of any kind, which returns weights.",
    ),
    "eval": Command("evaluate", "evaluate", "Evaluate a model on tasks, with intervals, cost and a report."),
    "compare": Command(
        "evaluate", "compare", "Compare two evaluations on the tasks that both have, with a paired test."
    ),
    "worker": Command("queue", "worker", "Join a store from anywhere and play its rollouts."),
    "serve": Command("queue", "serve", "Offer a store over HTTP."),
    "enqueue": Command("queue", "enqueue", "Put rollouts in a store, for workers to play."),
    "ps": Command(
        "queue",
        "ps",
        "Show a store's rollouts and workers, what each is waiting for, and this machine's boxes.",
    ),
    "cancel": Command("queue", "cancel", "Withdraw rollouts; a worker that plays one stops."),
    "gateway": Command(
        "gateway", "gateway", "Serve OpenAI's and Anthropic's APIs to agents, and record what they do."
    ),
    "model": Command("model", "app", "Fetch models for this machine, and list them."),
    "images": Command("images", "app", "List, build, import and remove the images of boxes."),
    "envs": Command("envs", "envs", "List the environments by tag."),
    "play": Command("envs", "play", "Play TAG in the terminal."),
    "ui": Command("ui", "ui", "Open a page in the browser to look at runs, live and afterwards."),
    "show": Command("show", "show", "Show RUN's results, a group, or ROLLOUT's trajectory."),
    "profile": Command(
        "profile", "profile", "Show what RUN's rollouts waited for, and what would make it faster."
    ),
    "plot": Command(
        "report",
        "plot",
        "Plot RUN: reward, its components, episode lengths, catches of filters, shapes of trees.",
    ),
    "report": Command("report", "report", "Show what RUN's model learned."),
    "rescore": Command(
        "rescore", "rescore", "Compute RUN's rewards again from its stored trajectories, without an engine."
    ),
    "export": Command("report", "export", "Write RUN's trajectories to a file."),
    "config": Command("config", "app", "Show configurations, and migrate or restore their files."),
    "doctor": Command("doctor", "doctor", "Check machine, config, engine and node, and say what to fix."),
    "swarm": Command("swarm", "app", "Train together with other machines by sharing rollouts."),
}
"""Subcommands in the order of the help page."""


class _Deferred(TyperCommand):
    """Placeholder of a subcommand that is imported when it is called."""

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(name, help=command.help)
        self._command = command

    def load(self) -> Any:
        """Import the subcommand, for the command line parser to run."""
        found = getattr(import_module(f"rollwright.cli.{self._command.module}"), self._command.name)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(self.name)(function)
        loaded = typer.main.get_command(found)
        loaded.name = self.name
        return loaded


class _DeferredGroup(TyperGroup):
    """All subcommands by name; the called one is loaded in place of its placeholder."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: _Deferred(name, command) for name, command in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, _Deferred) else command, rest


app = typer.Typer(cls=_DeferredGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollwright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Agentic-RL rollouts, from a laptop to a cluster to a swarm."""


def main() -> None:
    """Run the command; `rollwright.cli.entry` has installed the signal handlers before this import."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # a user's own environments, filters and agents are in the current folder
    with INTERRUPTS.temporarily_installed():
        _run_command()


def _run_command() -> None:
    try:
        app()
    except RollwrightError as error:
        _exit_with_line(str(error), error.exit_code)
    except OSError as error:  # a full disk, a file without permission, a file in place of a folder
        _exit_with_line(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (MemoryError, RuntimeError) as error:
        from rollwright.hardware import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        _exit_with_line(
            f"out of memory: {str(error) or 'an allocation failed'}; {LESS_MEMORY}", OUT_OF_MEMORY
        )
    except (KeyboardInterrupt, SignalReceived):
        _exit_with_line("interrupted", INTERRUPTS.exit_code, title="")


def _exit_with_line(message: str, code: int = RollwrightError.exit_code, title: str = "error: ") -> NoReturn:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble((title, "bold red"), " ".join(message.split()))
    Console(stderr=True, soft_wrap=True).print(line)
    sys.exit(code)
