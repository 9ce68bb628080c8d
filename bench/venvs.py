"""Each peer lives in a virtual environment of its own, under `.venvs/NAME` at the root of the repository.

True of it: the packages a benchmark compares with never meet rollwright's own dependencies; an environment
is made once, and made again when its pins change or when an install did not finish, because the marker
that lists the pins is written last.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

_ROOT = Path(__file__).resolve().parent.parent / ".venvs"
_MARKER = "installed.txt"


class InstallFailed(SystemExit):
    """pip could not install a peer; the message ends with pip's own last line."""


def peer_python(
    name: str, packages: Sequence[str], console: Console | None = None, *, interpreter: str = sys.executable
) -> Path:
    """The interpreter of the environment `name` that holds exactly these pinned `packages`; `interpreter`: it is made with."""
    home = _ROOT / name
    python = home / "bin" / "python"
    marker = home / _MARKER
    pins = "\n".join(packages) + "\n"
    if marker.exists() and marker.read_text() == pins and python.exists():
        return python
    console = console or Console(stderr=True)
    shutil.rmtree(home, ignore_errors=True)
    with console.status(f"making .venvs/{name}: {', '.join(packages)} (once; a minute or two)"):
        _run(name, [interpreter, "-m", "venv", str(home)])
        _run(name, [str(python), "-m", "pip", "install", "--disable-pip-version-check", *packages])
    marker.write_text(pins)
    console.print(f"made .venvs/{name}: {', '.join(packages)}")
    return python


def add_without_dependencies(name: str, python: Path, package: str) -> Path:
    """Adds a pinned package to the environment `name`, without the packages that it asks for; returns `python`."""
    marker = _ROOT / name / f"{package}.txt"
    if not marker.exists():
        _run(name, [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", package])
        marker.write_text("")
    return python


def _run(name: str, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise InstallFailed(f"cannot make .venvs/{name}: `{' '.join(command[-3:])}` failed: {lines[-1]}")
