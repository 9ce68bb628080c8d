"""The `rollwright` command.

A user's mistake ends with one line on standard error and exit code 2; an engine that cannot be used with 1; an interrupt
with 130, SIGTERM with 143; want of memory with 137. A traceback means a defect of rollwright.
"""

import asyncio
import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from rollwright import __version__
from rollwright.cli import (
    config,
    doctor,
    envs,
    export,
    gateway,
    model,
    play,
    plot,
    profile,
    queue,
    report,
    run,
    show,
    swarm,
    swarm_supervision,
    train,
    workers,
)
from rollwright.errors import RollwrightError
from rollwright.hardware.memory import is_out_of_memory
from rollwright.policies.base import EngineError
from rollwright.signals import INTERRUPTS

app = typer.Typer(
    help="Play multi-turn episodes of language-model agents, and hand out grouped batches.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

USER_ERROR = 2

NO_ENGINE = 1
"""The engine cannot be used: not there, refuses, or does not serve the model."""

OUT_OF_MEMORY = 137
"""As for a process that the kernel kills for it, so that whoever watches need not tell them apart."""

LESS_MEMORY = "make training.tokens_per_micro_batch or policy.max_batch smaller, or choose a smaller model"


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


app.command("run")(run.run)
app.command("resume")(run.resume)
app.command("train")(train.train)
app.command("worker")(workers.worker)
app.command("serve")(workers.serve)
app.command("enqueue")(queue.enqueue)
app.command("ps")(queue.ps)
app.command("cancel")(queue.cancel)
app.command("gateway")(gateway.gateway)
app.add_typer(model.app, name="model")
app.command("envs")(envs.envs)
app.command("play")(play.play)
app.command("show")(show.show)
app.command("profile")(profile.profile)
app.command("plot")(plot.plot)
app.command("report")(report.report)
app.command("export")(export.export)
app.add_typer(config.app, name="config")
app.command("doctor")(doctor.doctor)
swarm_supervision.register(swarm.swarm_app)
app.add_typer(swarm.swarm_app, name="swarm")


def main() -> None:
    """`rollwright.cli.entry` comes before it, so that signals are answered while all this is imported."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # one's own environments, filters and agents lie in the current folder
    with INTERRUPTS.installed_meanwhile():
        _run_command()


def _run_command() -> None:
    try:
        app()
    except EngineError as error:
        _complain(str(error), NO_ENGINE)
    except RollwrightError as error:
        _complain(str(error))
    except OSError as error:  # a folder that is a file, a full disk, a file that may not be written
        _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _complain(
            f"out of memory: {str(error) or 'nothing more could be taken'}; {LESS_MEMORY}", OUT_OF_MEMORY
        )
    except (KeyboardInterrupt, asyncio.CancelledError):
        _complain("interrupted", INTERRUPTS.exit_code, title="")


def _complain(message: str, code: int = USER_ERROR, title: str = "error: ") -> NoReturn:
    line = Text.assemble((title, "bold red"), " ".join(message.split()))
    Console(stderr=True, soft_wrap=True).print(line)
    sys.exit(code)
