"""`rollwright train`: trains a model on the episodes that it plays, in a run folder.

The settings are checked first: the modules that training needs are imported (`train_execution`) once they are accepted.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollwright.cli.console import RUNS, Overrides, complete_config, complete_run, warn_of_password
from rollwright.cli.loading import check_tags_known
from rollwright.cli.run import LiveOption, RunsOption
from rollwright.cli.ui import UiOption
from rollwright.errors import ConfigError

if TYPE_CHECKING:
    from rollwright.config import RunConfig


RankRayOption = Annotated[
    str | None,
    typer.Option(
        help="Run the trainer's other ranks (training.processes) as actors of this Ray: auto, local or HOST:PORT.",
        show_default=False,
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(help="Resume this run folder.", show_default=False, autocompletion=complete_run),
]
StoreOption = Annotated[
    str | None,
    typer.Option(help="Where rollouts are kept. Default: in the run folder.", callback=warn_of_password),
]


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file with a `training` part.", show_default=False, autocompletion=complete_config
        ),
    ] = None,
    overrides: Overrides = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            help="Train on the batches that this run has recorded, without an engine.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    resume: ResumeOption = None,
    runs: RunsOption = RUNS,
    store: StoreOption = None,
    report: Annotated[
        bool, typer.Option("--report", help="At the end, do what `rollwright report` does.")
    ] = False,
    ray: RankRayOption = None,
    live: LiveOption = True,
    ui: UiOption = False,
) -> None:
    """Train as CONFIG says. Ctrl-C ends cleanly, and a crash costs nothing but time: `--resume RUN` continues."""
    if _follows_torchrun():
        return
    changes = list(overrides or [])
    if resume is None and (begun := _begun_by_torchrun(runs)) is not None:
        config, from_run, resume, changes = None, None, begun, []
    if config is not None and "=" in str(config) and not config.is_file():
        changes.insert(0, str(config))  # without a file, the first setting is in its place
        config = None
    if resume is not None:
        if config is not None or from_run is not None:
            raise ConfigError(
                "--resume: a run is resumed with its own settings; give no CONFIG and no --from-run"
            )
        from rollwright.cli.train_execution import resume_training

        resume_training(resume, changes, store=store, live=live, ui=ui, ray=ray)
        return
    settings = _settings(config, changes, from_run)
    check_tags_known(settings)
    from rollwright.cli.train_execution import begin

    begin(settings, runs=runs, store=store, live=live, report=report, ui=ui, ray=ray)


def _follows_torchrun() -> bool:
    """Whether this process is one of torchrun's ranks other than 0; returns when rank 0 has ended the training."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0":
        return False
    from rollwright.training.ranks.torchrun import follow_torchrun

    follow_torchrun()
    return True


def _begun_by_torchrun(runs: Path) -> Path | None:
    """The run folder that the processes before a restart by torchrun have begun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    from rollwright.training.ranks.torchrun import marker

    file = marker(runs)
    return runs / file.read_text(encoding="utf-8").strip() if file.is_file() else None


def serve_batches(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file to play by.", show_default=False, autocompletion=complete_config),
    ] = None,
    overrides: Overrides = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on. Default: 127.0.0.1.", show_default=False),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="0: any free one. Default: 8710.", show_default=False),
    ] = None,
    lease_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Time after which a silent trainer's batch is handed out again. Default: 60.",
            show_default=False,
        ),
    ] = None,
    resume: ResumeOption = None,
    runs: RunsOption = RUNS,
    store: StoreOption = None,
    live: LiveOption = True,
) -> None:
    """Play as CONFIG says, and offer the batches over HTTP to a trainer of any kind, which returns weights.

    With ROLLWRIGHT_BATCH_TOKEN set, trainers have to send that token; without it, only this machine is served.
    """
    served = {"host": host, "port": port, "lease_seconds": lease_seconds}
    # What is not given stays as the file, or the run that is resumed, has it.
    changes = [f"training.serve.{key}={value}" for key, value in served.items() if value is not None]
    if resume is None:
        changes.insert(0, "training.serve={}")
    if os.environ.get(BATCH_TOKEN):
        changes.append(f"training.serve.token_env={BATCH_TOKEN}")
    train(config, [*changes, *(overrides or [])], resume=resume, runs=runs, store=store, live=live)


BATCH_TOKEN = "ROLLWRIGHT_BATCH_TOKEN"
"""Environment variable with the token that trainers send."""


def _settings(config: Path | None, changes: list[str], from_run: Path | None) -> "RunConfig":
    from rollwright.config import build, load

    if from_run is None:
        if config is None:
            raise ConfigError("CONFIG: is needed, unless --from-run or --resume names a run")
        return load(config, changes)
    changes = [*changes, f"training.from_run={from_run}"]
    if config is not None:
        return load(config, changes)
    from rollwright.run.folder import CONFIG, RunReader, read_settings

    RunReader(from_run)  # raises an error if this is no run folder
    file = from_run / CONFIG
    content = read_settings(from_run)
    return build({**content, "training": content.get("training") or {}}, changes, source=str(file))
