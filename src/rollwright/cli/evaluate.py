"""`rollwright eval` and `rollwright compare`: evaluate a model with figures one can believe, and compare two evaluations.

The settings are checked first: the modules that playing needs are imported (`evaluate_execution`) once they are accepted.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from rollwright.cli.console import RUNS, complete_config, complete_run, console, warn_of_password
from rollwright.cli.run import LiveOption, RayOption, RunsOption
from rollwright.errors import ConfigError

ROW_FILES = (".jsonl", ".csv", ".parquet")
"""Endings of files with tasks."""

PLAYERS = ("simulated", "random", "oracle")
"""Policies that need no model."""


def evaluate(
    config: Annotated[
        str | None,
        typer.Argument(
            help="YAML file; its section `evaluation` says what to play. May be left out with --tasks.",
            show_default=False,
            autocompletion=complete_config,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that win over the file: key.path=value …", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model in place of the file's policy: a folder, a fetched model, or owner/name on a hub; with --url, the name "
            f"that the API knows it by; or {', '.join(PLAYERS)}.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of an OpenAI-compatible API, for example http://127.0.0.1:8000/v1.",
            show_default=False,
        ),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(help="Name of the environment variable with the API's key.", show_default=False),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Environment's tag, or file of tasks (.jsonl, .csv, .parquet); may be given several times.",
            show_default=False,
        ),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="Reward of the files' tasks: exact_match, math_verify, module:function … Default: exact_match.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Tasks in all. Default: all rows, 100 levels.", show_default=False),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", min=1, help="Episodes of each task.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="Sampling temperature. Default: 0 with one sample, else 1.", show_default=False
        ),
    ] = None,
    half_width: Annotated[
        float | None,
        typer.Option(min=0.0001, help="Stop early when the interval is at most ± this.", show_default=False),
    ] = None,
    difficulty: Annotated[
        list[str] | None,
        typer.Option(
            help="Earlier evaluation (its folder), or auto for all others of --runs: tasks that tell most, by its results, "
            "are played first. May be given several times.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option(help="Play everything, also what an earlier evaluation played.")
    ] = False,
    runs: RunsOption = RUNS,
    store: Annotated[
        str | None, typer.Option(help="Where rollouts are kept, as for `run`.", callback=warn_of_password)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Most worker processes. Default: this process plays.")
    ] = None,
    ray: RayOption = None,
    live: LiveOption = True,
) -> None:
    """Evaluate a model on tasks, with intervals, cost and a report. Ctrl-C ends cleanly; `rollwright resume` continues."""
    given = list(overrides or [])
    if config is not None and "=" in config and not Path(config).exists():
        given.insert(0, config)
        config = None
    from rollwright.config import build, load

    base = load(config).model_dump(mode="json", exclude_unset=True) if config is not None else {}
    options: dict[str, Any] = {
        "tasks": limit,
        "samples": samples,
        "temperature": temperature,
        "half_width": half_width,
        "difficulty": [each if each == "auto" else str(Path(each).absolute()) for each in difficulty or ()]
        or None,
        "cache": False if fresh else None,
    }
    content = add_options(base, model, url, key_env, tasks or [], reward or [], options)
    if config is None and not tasks and not any(each.startswith("evaluation.tags") for each in given):
        raise ConfigError(
            "eval: give a configuration, or --tasks with a tag or a file; see `rollwright envs`"
        )
    settings = build(content, given, source=config or "eval")
    from rollwright.cli.evaluate_execution import begin

    begin(settings, runs=runs, store=store, workers=workers, ray=ray, live=live)


def add_options(
    base: dict[str, Any],
    model: str | None,
    url: str | None,
    key_env: str | None,
    tasks: list[str],
    rewards: list[str],
    options: dict[str, Any],
) -> dict[str, Any]:
    """A configuration's content with the command's options."""
    content = {"name": "evaluation", **base}
    if model is not None:
        content["policy"] = policy_of(model, url, key_env)
    elif url is not None:
        raise ConfigError("--url: needs --model, the name that the API knows the model by")
    chosen = {name: value for name, value in options.items() if value is not None}
    if tasks:
        tags = []
        for each in tasks:
            tag = each
            if each.endswith(ROW_FILES):
                tag = Path(each).stem
                custom = dict(content.get("custom_envs") or {})
                custom[tag] = {"tasks": str(Path(each).absolute()), "rewards": rewards or ["exact_match"]}
                content["custom_envs"] = custom
            tags.append(tag)
        chosen["tags"] = tags
    if chosen or "evaluation" not in content:
        content["evaluation"] = {**(content.get("evaluation") or {}), **chosen}
        if tasks and limit_is_inherited(options, content["evaluation"]):
            content["evaluation"].pop("tasks", None)
    return content


def limit_is_inherited(options: dict[str, Any], evaluation: dict[str, Any]) -> bool:
    """Whether a file's numbers of tasks stand beside tags that the command has replaced."""
    return options["tasks"] is None and isinstance(evaluation.get("tasks"), list)


def policy_of(model: str, url: str | None, key_env: str | None) -> dict[str, Any]:
    """Settings of the policy that `--model` and `--url` name."""
    if url is not None:
        return {
            "kind": "openai",
            "model": model,
            "base_url": url,
            **({} if key_env is None else {"api_key_env": key_env}),
        }
    if key_env is not None:
        raise ConfigError("--key-env: needs --url, the address of the API")
    return {"kind": model} if model in PLAYERS else {"kind": "torch", "model": model}


def compare(
    first: Annotated[
        Path,
        typer.Argument(
            help="Evaluation: its run folder or report.json.", autocompletion=complete_run, show_default=False
        ),
    ],
    second: Annotated[
        Path, typer.Argument(help="The other evaluation.", autocompletion=complete_run, show_default=False)
    ],
    html: Annotated[
        Path | None, typer.Option(help="Write the comparison as a page.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare two evaluations on the tasks that both have, with a paired test."""
    import json

    from rollwright.evaluation.comparison import (
        compare_reports,
        comparison_html,
        comparison_table,
        notes,
        verdict,
    )
    from rollwright.run.evaluating import load_report

    found = compare_reports(load_report(first), load_report(second), (str(first), str(second)))
    if html is not None:
        html.write_text(comparison_html(found), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    from rollwright.cli.evaluate_execution import rich_table

    screen = console()
    screen.print(verdict(found), soft_wrap=True, highlight=False, markup=False)
    screen.print(rich_table("", comparison_table(found)))
    for line in notes(found):
        screen.print(line[2:], soft_wrap=True, highlight=False, markup=False)
    if html is not None:
        screen.print(f"page: {html}", soft_wrap=True, highlight=False, markup=False)
