"""Adapter for verifiers (v1): its environments are played by its own rollout, with the run's model as its client.

`verifiers:ID` names a task set as verifiers does: an installed package, one that comes with it, or a folder or file on this
machine. The level chooses the task. The reward is that of the trace, with its named rewards and metrics; whatever verifiers
reports as an error is a failure. There is one reward at the end of an episode, and it cannot be forked.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rollwright.envs.foreign import PROGRAMS, ForeignEpisodeEnv, ForeignPackage
from rollwright.envs.foreign.episodes import DEFAULT_STALL_SECONDS
from rollwright.errors import ConfigError

_REQUIREMENTS = ("verifiers==0.4.0", "uv==0.13.8")
"""`uv` prepares the programs of harnesses."""


class Verifiers(ForeignEpisodeEnv):
    """Episodes of one environment of verifiers."""

    def __init__(
        self,
        task_set: str,
        *,
        taskset: Mapping[str, Any] | None = None,
        harness: str | Mapping[str, Any] | None = None,
        runtime: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        way: Literal["auto", "direct", "gateway", "program"] = "auto",
        install: Sequence[str] = (),
        max_steps: int = 50,
        num_tasks: int | None = None,
        success_at: float = 1.0,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
    ) -> None:
        """`taskset`, `env`: further settings of the task set and of the environment, as verifiers has them. `harness`,
        `runtime`: of every agent; unset: the task set's own, else `null`, in subprocesses on this machine. `way`: how the model
        is reached. `install`: what pip installs beside verifiers. `max_steps`: model calls of one agent. `num_tasks`: how many
        tasks are played, from the first one on; unset: all. `success_at`: reward of a solved task. `stall_seconds`: how long
        an episode may block its process."""
        if max_steps < 1:
            raise ConfigError(f"max_steps must be 1 or more, got {max_steps}")
        if num_tasks is not None and num_tasks < 1:
            raise ConfigError(f"num_tasks must be 1 or more, got {num_tasks}")
        if stall_seconds <= 0:
            raise ConfigError(f"stall_seconds must be positive, got {stall_seconds:g}")
        ident, path, needs = _find(task_set)
        package = ForeignPackage(
            "verifiers",
            PROGRAMS / "verifiers_env.py",
            _REQUIREMENTS,
            beside=(*needs, *map(_resolve, install)),
            release="0.4.",
        )
        options: dict[str, Any] = {
            "id": ident,
            "path": path,
            "taskset": dict(taskset or {}),
            "harness": harness if harness is None or isinstance(harness, str) else dict(harness),
            "runtime": None if runtime is None else dict(runtime),
            "env": dict(env or {}),
            "way": way,
            "max_turns": max_steps,
            "num_tasks": num_tasks,
        }
        said = package.describe(options)
        self.way: str = said["way"]
        """How the model is reached: `direct`, `gateway` or `program`."""
        self.needs_gateway = said["needs_gateway"]
        super().__init__(package, options, success_at=success_at, stall_seconds=stall_seconds)


def _find(task_set: str) -> tuple[str, str, tuple[str, ...]]:
    """The id that verifiers imports, the folder to import it from, and what its package requires. A name that is no folder or
    file is an installed package."""
    place = Path(task_set).expanduser()
    if place.suffix == ".py" and place.is_file():
        return place.stem, str(place.resolve().parent), ()
    if not place.is_dir():
        if "/" in task_set and task_set.startswith((".", "/", "~")):
            raise ConfigError(f"{task_set}: no such folder or file")
        return task_set, "", ()
    place = place.resolve()
    described = place / "pyproject.toml"
    if not described.is_file():
        return place.name, str(place.parent), ()
    return place.name, str(place), _dependencies(described)


def _dependencies(described: Path) -> tuple[str, ...]:
    """What a package requires beside verifiers itself."""
    try:
        told = tomllib.loads(described.read_text()).get("project", {}).get("dependencies", [])
    except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{described}: cannot be read: {error}") from error
    return tuple(each for each in told if each.partition(";")[0].strip() != "verifiers")


def _resolve(requirement: str) -> str:
    """A folder as its whole path, because the installer runs elsewhere."""
    place = Path(requirement).expanduser()
    return str(place.resolve()) if place.exists() else requirement
