"""Virtual environments for foreign packages, made once and kept in the cache.

Always true: an environment is used only when it is complete, because the file that lists its packages is written last; two
processes that want the same one wait for each other.
"""

import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rollwright.errors import ConfigError

_MARKER = "installed.txt"


def make_venv(home: Path, requirements: Sequence[str]) -> Path:
    """The interpreter of the environment in `home` that has exactly these packages; made anew where they are others.

    Raises a `ConfigError` with the installer's own last line.
    """
    python = home / "bin" / "python"
    wanted = "\n".join(requirements) + "\n"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_name(home.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_complete(home, wanted):
            shutil.rmtree(home, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(home)])
            _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *requirements])
            (home / _MARKER).write_text(wanted)
    return python


def venv_folder(root: Path, name: str, requirements: Sequence[str]) -> Path:
    """Where the environment of these packages is kept: other versions, or another Python, get another folder."""
    said = "\n".join([platform.python_version(), *requirements])
    return root / "venvs" / f"{name}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"


def _is_complete(home: Path, wanted: str) -> bool:
    marker = home / _MARKER
    return marker.is_file() and marker.read_text() == wanted and (home / "bin" / "python").exists()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"`{' '.join(command[-3:])}` failed: {lines[-1]}")
