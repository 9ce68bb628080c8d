"""Plays an evaluation on a terminal and shows its report. Imported once the settings are accepted."""

from pathlib import Path
from typing import Any, Unpack

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from rollwright.cli.console import console, plain_lines
from rollwright.cli.event_loop import run_async
from rollwright.cli.run import say_default_policy
from rollwright.cli.run_execution import PlayOptions, exit_unless_done, play_on_screen, say_end
from rollwright.config import RunConfig
from rollwright.evaluation.pages import Table, breakdown_tables, facts, headline, k_table, score_table, title
from rollwright.run.checks import prepare_policy
from rollwright.run.evaluating import REPORT_HTML, evaluate_run, settle_evaluation
from rollwright.run.folder import RunFolder
from rollwright.run.model_choice import settle_model


def begin(
    settings: RunConfig,
    *,
    runs: Path,
    store: str | None,
    workers: int | None,
    ray: str | None,
    live: bool,
) -> None:
    """Evaluate into a new folder of `runs`."""
    settings = settle_model(settings, say=plain_lines(console()))
    settings = settle_evaluation(settings)
    policy = run_async(prepare_policy(settings, workers=workers, ray=ray))
    say_default_policy(settings)
    folder, settings = RunFolder.create(runs, settings)
    execute_evaluation(
        settings, folder, store=store, workers=workers, ray=ray, live=live, policy=policy, resume=False
    )


def execute_evaluation(
    config: RunConfig, folder: RunFolder, *, live: bool, **options: Unpack[PlayOptions]
) -> None:
    """Play the evaluation and show its report; exits with the signal's code after an interruption."""
    screen = console()
    (summary, report), _ = play_on_screen(evaluate_run, config, folder, live, options)
    show_report(report)
    screen.print(f"report: {folder.path / REPORT_HTML}", soft_wrap=True, highlight=False)
    say_end(summary, folder.path, screen)
    exit_unless_done(summary, folder)


def show_report(report: dict[str, Any]) -> None:
    """Print a report."""
    screen = console()
    screen.print(
        Text.assemble((title(report), "bold"), ": ", headline(report)), soft_wrap=True, highlight=False
    )
    for name, text in facts(report)[1:]:
        screen.print(Text.assemble((f"  {name}: ", "dim"), text), soft_wrap=True, highlight=False)
    screen.print(rich_table("", score_table(report)))
    if (several := k_table(report)) is not None:
        screen.print(rich_table("several samples", several))
    for name, table in breakdown_tables(report):
        screen.print(rich_table(name, table))
    for each in report["failures"]:
        screen.print(
            Text(f"  failed: {each['count']:,} × {each['cause']}", style="yellow"),
            soft_wrap=True,
            highlight=False,
        )


def rich_table(name: str, table: Table) -> RichTable:
    """A table of the report for the terminal."""
    heads, rows = table
    made = RichTable(title=name or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for place, head in enumerate(heads):
        made.add_column(head, justify="left" if place == 0 else "right", no_wrap=place > 0)
    for row in rows:
        made.add_row(*(Text(str(each)) for each in row))
    return made
