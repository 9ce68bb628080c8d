"""`rollwright envs` and `rollwright play`: list the environments, and play one by hand."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from rollwright.cli.console import console
from rollwright.envs import registry
from rollwright.errors import ConfigError

if TYPE_CHECKING:
    from rollwright.envs.base import Env


def complete_tag(incomplete: str) -> list[str]:
    """Complete a tag, or the prefix of a family such as `gymnasium`."""
    known = [*registry.tags(), *(f"{prefix}:" for prefix in registry.PREFIXES)]
    return [each for each in known if each.startswith(incomplete)]


def envs() -> None:
    """List the environments by tag."""
    table = Table(title="environments", title_justify="left")
    table.add_column("tag", no_wrap=True)
    table.add_column("what it is")
    table.add_column("actions", justify="right")
    for tag in registry.tags():
        spec = registry.spec(tag)
        table.add_row(tag, spec.description, str(spec.max_steps))
    for prefix, meaning in registry.PREFIXES.items():
        table.add_row(f"{prefix}:…", meaning, "")
    console().print(table)


def play(
    tag: Annotated[
        str,
        typer.Argument(
            help="Environment; see `rollwright envs`.", show_default=False, autocompletion=complete_tag
        ),
    ],
    seed: Annotated[int, typer.Option(help="The level.")] = 0,
) -> None:
    """Play TAG in the terminal. An action by its name or number; `?` asks the oracle; empty input ends."""
    from rollwright.cli.event_loop import run_async

    run_async(_play(registry.make(tag), console(), seed), at_once=True)


async def _play(env: "Env", console: Console, seed: int) -> None:
    from rollwright.engines.base import Playable
    from rollwright.envs.base import PlaysEpisodes

    if isinstance(env, PlaysEpisodes):
        raise ConfigError(
            "its episodes are played by its own loop with a model; see `rollwright run` and `rollwright eval`"
        )
    first = await env.reset(seed)
    console.print(env.instruction, highlight=False, markup=False)
    console.print(Panel.fit(_plain(first.observation), title=f"level {seed}"))
    score = 0.0
    try:
        while (typed := _read_action(console, env)) is not None:
            if typed == "?":
                hint = env.best_action() if isinstance(env, Playable) else None
                console.print(
                    f"the oracle would play: {hint or 'nothing, it knows no solution'}", highlight=False
                )
                continue
            step = await env.step(_answer(env, typed))
            penalty = step.info.get("penalty", 0.0)
            score += step.reward + penalty
            title = f"reward {step.reward:+g}" + (f", format penalty {penalty:+g}" if penalty else "")
            console.print(Panel.fit(_plain(step.observation), title=title))
            if step.terminated or step.truncated:
                solved = step.info.get("success")
                word = "solved" if solved else "over" if step.terminated else "no actions left"
                console.print(f"[bold]{word}[/]: {score:+g} in all")
                return
        console.print(f"left with {score:+g}")
    finally:
        await env.close()


def _read_action(console: Console, env: "Env") -> str | None:
    from rollwright.engines.base import Playable

    names = list(env.actions()) if isinstance(env, Playable) else []
    offered = "  ".join(f"[bold]{number}[/] {name}" for number, name in enumerate(names, 1))
    try:
        return console.input(f"{offered} > ").strip() or None
    except EOFError:
        return None


def _answer(env: "Env", typed: str) -> str:
    """The typed action in the environment's format; a number selects the action at that position."""
    from rollwright.engines.base import Playable

    if not isinstance(env, Playable):
        return typed
    names = list(env.actions())
    if typed.isdigit() and typed not in names and 1 <= int(typed) <= len(names):
        typed = names[int(typed) - 1]
    return env.answer(typed)


def _plain(observation: str) -> str:
    return observation.replace("[", "\\[")
