"""`rollwright ui`: a page in the browser to look at runs, and the `--ui` of commands that play or train.

With `--ui` the page is a process of its own, so that it takes no time from the run. It ends with the command; on a terminal
the command stays until Ctrl-C, so that the results can be looked at.
"""

import contextlib
import os
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rollwright.addresses import has_password
from rollwright.cli.console import RUNS, complete_run, console, plain_lines, say_aside
from rollwright.errors import ConfigError
from rollwright.signals import INTERRUPTS

READY = "page: "
"""Beginning of the line that tells the address."""

UiOption = Annotated[bool, typer.Option("--ui", help="Open the page of `rollwright ui` for this run.")]


def ui(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders with runs, run folders, or stores: a file, http://…, postgresql://… Default: runs.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Off loopback a token is needed, which is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
    prices: Annotated[
        str | None,
        typer.Option(
            help="Price of a million prompt tokens and of a million sampled ones, as 0.15,0.6.",
            show_default=False,
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    tied: Annotated[
        bool, typer.Option("--tied", help="End when standard input ends, as it does with a parent process.")
    ] = False,
) -> None:
    """Open a page in the browser to look at runs, live and afterwards. It only reads."""
    from rollwright.cli.event_loop import run_async
    from rollwright.ui.server import serve, token_for

    places = runs or [str(RUNS)]
    costs = _prices(prices)
    for place in places:
        if has_password(place):
            say_aside(
                "arguments can be read by every user of this machine; give passwords by PGPASSWORD or a password file"
            )
    token = token_for(host)
    say = plain_lines(console())

    def ready(url: str) -> None:
        shown = url if token is None else f"{url}?token={token}"
        say(f"{READY}{shown}")
        sys.stdout.flush()
        if browser and can_open_browser():
            webbrowser.open(shown)

    if tied:
        from rollwright.run.worker_process import end_with_parent

        end_with_parent()
    run_async(serve(places, host=host, port=port, token=token, prices=costs, on_ready=ready))


def _prices(told: str | None) -> tuple[float, float] | None:
    if told is None:
        return None
    try:
        prompt, sampled = (float(each) for each in told.split(","))
    except ValueError:
        raise ConfigError(f"--prices: {told!r}; expected two numbers, such as 0.15,0.6") from None
    return prompt, sampled


def can_open_browser() -> bool:
    """Whether there is a screen to open a browser on."""
    return sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )


@contextlib.contextmanager
def page_of(run: Path, *, wanted: bool) -> Iterator[None]:
    """The page of a run, in a process of its own, for the length of the block and, on a terminal, until Ctrl-C."""
    if not wanted:
        yield
        return
    words = [sys.executable, "-m", "rollwright", "ui", str(run), "--port", "0", "--tied"]
    # In a session of its own: Ctrl-C on the terminal is for the run, which may need the page to show its end.
    page = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert page.stdin is not None
    assert page.stdout is not None
    try:
        line = page.stdout.readline().strip()
        say = plain_lines(console())
        say(line or f"page: it could not be started; see `rollwright ui {run}`")
        yield
        if line and console().is_terminal:
            say(f"the {line} stays until Ctrl-C")
            with INTERRUPTS.handled_by(page.stdin.close):
                page.wait()
    finally:
        page.stdin.close()
        page.wait()
