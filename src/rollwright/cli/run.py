"""`rollwright run` and `rollwright resume`: play a configuration's episodes into a run folder.

The settings are checked first: the modules that playing needs are imported (`run_execution`) once they are accepted.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollwright.cli.console import (
    RUNS,
    ConfigArgument,
    Overrides,
    RunArgument,
    console,
    plain_lines,
    warn_of_password,
)
from rollwright.cli.loading import load_to_play
from rollwright.cli.ui import UiOption, page_of

if TYPE_CHECKING:
    from rollwright.config import RunConfig

RayOption = Annotated[
    str | None,
    typer.Option(
        help="Play on a Ray cluster: auto, local or HOST:PORT. --workers is then the most actors.",
        show_default=False,
    ),
]
RunsOption = Annotated[Path, typer.Option(help="Folder that holds the run folders.")]
LiveOption = Annotated[bool, typer.Option(help="Show the progress.")]


def run(
    config: ConfigArgument,
    overrides: Overrides = None,
    runs: RunsOption = RUNS,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where rollouts are kept: memory, a path, postgresql://…, http://… Default: in the run folder.",
            callback=warn_of_password,
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Most worker processes. Default: this process plays.")
    ] = None,
    ray: RayOption = None,
    live: LiveOption = True,
    ui: UiOption = False,
) -> None:
    """Play the episodes that CONFIG asks for. Ctrl-C ends cleanly; `rollwright resume` continues from there."""
    settings = load_to_play(config, overrides)
    from rollwright.cli.event_loop import run_async
    from rollwright.cli.run_execution import execute
    from rollwright.run.build_tasks import record_fingerprints
    from rollwright.run.checks import prepare_policy
    from rollwright.run.folder import RunFolder
    from rollwright.run.model_choice import settle_model

    say = plain_lines(console())
    settings = settle_model(settings, say=say)
    settings = record_fingerprints(settings)
    policy = run_async(prepare_policy(settings, workers=workers, ray=ray))
    say_default_policy(settings)
    folder, settings = RunFolder.create(runs, settings)
    with page_of(folder.path, wanted=ui):
        execute(
            settings, folder, store=store, workers=workers, ray=ray, live=live, policy=policy, resume=False
        )


def resume(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings that may change: max_steps=20 limits.step_timeout=5 …", show_default=False
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="The store that the run used, if not its own.", callback=warn_of_password),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Most worker processes.")] = None,
    ray: RayOption = None,
    live: LiveOption = True,
    ui: UiOption = False,
) -> None:
    """Resume RUN where it stopped: no finished episode is played again, no recorded token is sampled twice."""
    from rollwright.cli.condition import restore_lost_settings
    from rollwright.run.folder import RunReader
    from rollwright.run.training_record import is_training

    restore_lost_settings(run, store, console())
    reader = RunReader(run)
    if is_training(run):
        from rollwright.cli.train_execution import resume_training

        resume_training(run, overrides or [], store=store, live=live, ui=ui)
        return
    from rollwright.cli.event_loop import run_async
    from rollwright.cli.run_execution import execute, repair_ended, say_ended
    from rollwright.run.checks import prepare_policy
    from rollwright.run.folder import RunFolder
    from rollwright.run.gc_tuning import rare_collections
    from rollwright.run.playing import Progress
    from rollwright.run.recovery import resumed_settings

    settings = resumed_settings(reader, overrides or [])
    if reader.ended and Progress.of(reader).is_complete(settings):
        repair_ended(reader, store)
        if settings.evaluation is not None:
            from rollwright.run.evaluating import write_report

            write_report(run, settings)
        say_ended(run, reader, console())
        return
    policy = run_async(prepare_policy(settings, workers=workers, ray=ray))
    with rare_collections():  # what is read of many records stays, so that collections would find nothing
        folder = RunFolder.reopen(run)
    if overrides:
        folder.keep_settings(settings)
    play = execute
    if settings.evaluation is not None:
        from rollwright.cli.evaluate_execution import execute_evaluation

        play = execute_evaluation
    with page_of(run, wanted=ui):
        play(settings, folder, store=store, workers=workers, ray=ray, live=live, policy=policy, resume=True)


def say_default_policy(settings: "RunConfig") -> None:
    """Print a line if no policy is configured: figures of the simulated engine must not pass for a model's."""
    if "policy" not in settings.model_fields_set:
        from rollwright.engines.settings import POLICY_KINDS

        plain_lines(console())(
            "policy: is not set, so the simulated engine plays and every result is SIMULATED; choose a policy with "
            f"policy.kind: {', '.join(POLICY_KINDS)}"
        )
