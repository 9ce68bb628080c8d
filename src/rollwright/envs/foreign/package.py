"""A foreign package and the program that speaks to it: which interpreter has it, and what it says of its settings."""

import functools
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.cache import cache_folder
from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.foreign.venvs import make_venv, venv_folder
from rollwright.errors import ConfigError

PROGRAMS = Path(__file__).parent / "programs"

_DESCRIBE_SECONDS = 180.0
"""Some packages take a minute to import on a busy machine."""


@dataclass(frozen=True)
class ForeignPackage:
    """A package whose environments are played in processes of its own interpreter."""

    name: str
    """As it is imported."""
    program: Path
    """The file that adapts it: it has `describe(**options)`, and `make(**options)`, whose methods are the operations."""
    requirements: tuple[str, ...]
    """What is installed into its virtual environment, where this interpreter does not have the package."""
    beside: tuple[str, ...] = ()
    """What the user wants to be installed beside it. With anything here, it has a virtual environment of its own."""
    release: str = ""
    """How the version of an installed package has to begin; another one is left alone."""

    def interpreter(self) -> Path:
        """This interpreter, if it has the package; else that of a virtual environment, which is made on first use."""
        if not self.beside and self._is_installed():
            return Path(sys.executable)
        wanted = (*self.requirements, *self.beside)
        home = venv_folder(cache_folder(), self.name, wanted)
        try:
            return make_venv(home, wanted)
        except ConfigError as error:
            raise ConfigError(
                f"{self.name} is not installed, and a virtual environment for it cannot be made: {error}"
            ) from error

    def _is_installed(self) -> bool:
        if importlib.util.find_spec(self.name) is None:
            return False
        return not self.release or importlib.metadata.version(self.name).startswith(self.release)

    def command(self) -> list[str]:
        """The command of its fork server, without its last argument."""
        return [str(self.interpreter()), "-I", str(PROGRAMS / "forkserver.py"), str(self.program)]

    def describe(self, options: dict[str, Any]) -> Any:
        """What the program says of these options, blocking; a `ConfigError` where the package refuses them."""
        try:
            return _describe(self, json.dumps(options, sort_keys=True))
        except TypeError as error:
            raise ConfigError(f"settings must be plain data: {error}") from error


@functools.lru_cache(maxsize=256)
def _describe(package: ForeignPackage, options: str) -> Any:
    try:
        done = subprocess.run(
            [*package.command(), "--describe"],
            input=options,
            capture_output=True,
            text=True,
            timeout=_DESCRIBE_SECONDS,
        )
        said = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailure(f"{package.name}: no answer within {_DESCRIBE_SECONDS:g} s") from error
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EnvironmentFailure(f"{package.name}: its process ended: {last}") from error
    if "error" in said:
        raise ConfigError(f"{package.name}: {said['error']}")
    return said["value"]
