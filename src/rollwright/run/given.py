"""Tasks, agents and rewards that a program gives as Python objects, and the names by which a configuration has them.

Always true: an object that its module has under its own name is named `module:name`, so every process that can import it
finds it. Any other, such as a closure or a lambda, has a name in this process alone; elsewhere that name is refused in one
line. Rows that are given as an iterable are written to a file under their checksum, once, so a resumed run finds the same.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from rollwright.cache import cache_folder
from rollwright.config import RunConfig, build
from rollwright.errors import ConfigError
from rollwright.rewards.functions import function_name
from rollwright.run.build_tasks import open_tag_tasks
from rollwright.run.validations import VALIDATION
from rollwright.tasks import TaskError
from rollwright.tasks.sources import open_tasks

TAG = "Tasks"
"""Tag of the tasks that a program gives."""

GROUPS, GROUP_SIZE = 8, 8
"""Of a training whose configuration does not say."""

VALIDATED = 64
"""Most held-out rows of a validation; its standard error is then 6 points at the most."""

VALIDATIONS = 4
"""Of a training, beside the one before its first step."""

_OBJECTS: dict[str, Any] = {}
"""Objects that no module has under their name, by the name that they have here."""


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name not in _OBJECTS:
        raise ConfigError(
            f"{name} was defined inside the program that began the run, and is only known there"
        )
    return _OBJECTS[name]


def path_of(given: Callable[..., Any]) -> str:
    """The name `module:name` by which a configuration has this object."""
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    try:
        if module and name and attrgetter(name)(import_module(module)) is given:
            return f"{module}:{name}"
    except (AttributeError, ImportError):
        pass  # a closure, a lambda, or an object without a name: kept here
    number = next((each for each, known in _OBJECTS.items() if known is given), None)
    if number is None:
        inner = given.func if isinstance(given, partial) else given
        word = "".join(each for each in getattr(inner, "__name__", "object") if each.isalnum() or each == "_")
        number = f"{word.strip('_') or 'object'}_{len(_OBJECTS) + 1}"
        _OBJECTS[number] = given
    return f"{__name__}:{number}"


def tasks_content(
    content: dict[str, Any], tasks: Any, agent: Any, reward: Any, held_out: float | str | Path | None
) -> dict[str, Any]:
    """The content of a configuration with a tag that plays these tasks with this agent and these rewards."""
    custom: dict[str, Any] = {"tasks": _tasks_name(tasks)}
    if held_out is not None:
        custom["held_out"] = held_out if isinstance(held_out, float) else _tasks_name(held_out)
    if agent is not None:
        custom["agent"] = _agent(agent)
    if reward is not None:
        custom["rewards"] = [
            _reward(each) for each in (reward if isinstance(reward, list | tuple) else [reward])
        ]
    known = content.get("custom_envs") or {}
    folder = content.get("folder") or str(Path.cwd())
    return {**content, "folder": folder, "custom_envs": {**known, TAG: {**known.get(TAG, {}), **custom}}}


def add_training(content: dict[str, Any]) -> dict[str, Any]:
    """Adds the groups of a training on the tag, for one epoch, and its validation; what the content has stays."""
    manager = {"num_env_groups": GROUPS, "group_size": GROUP_SIZE, **(content.get("train_env_manager") or {})}
    content = {**content, "train_env_manager": {**manager, "tags": [TAG]}}
    rows = open_tag_tasks(build(content, source="train"))[TAG]
    steps = content.setdefault("max_steps", math.ceil(len(rows.train) / manager["num_env_groups"]))
    if rows.held_out is not None and not content.get("val_env_manager"):
        content["val_env_manager"] = {"num_env_groups": min(len(rows.held_out), VALIDATED), "tags": [TAG]}
        content.setdefault("eval_steps", max(1, steps // VALIDATIONS))
    return content


def count_rows(config: RunConfig) -> int:
    """Rows of the tag that an evaluation plays: the held-out ones, if there are some."""
    return len(open_tag_tasks(config)[TAG].source(VALIDATION))


def _tasks_name(tasks: Any) -> str:
    """What the key `tasks` takes: a path or name as it is, a module's function by its name, rows by the file they are in."""
    if isinstance(tasks, Path):
        return str(tasks.resolve())
    if isinstance(tasks, str):
        return tasks
    if inspect.isfunction(tasks) and not (path := path_of(tasks)).startswith(f"{__name__}:"):
        return path
    return str(_write_rows(tasks))


def _write_rows(tasks: Iterable[Any] | Callable[[], Iterable[Any]]) -> Path:
    try:
        rows = open_tasks(tasks, folder=Path(), cache=cache_folder())
    except TaskError as error:
        raise ConfigError(str(error)) from error
    lines = b"".join(msgspec.json.encode(rows.row(number)) + b"\n" for number in range(len(rows)))
    file = cache_folder() / "tasks" / f"{blake2b(lines, digest_size=16).hexdigest()}.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial_file = file.with_suffix(".partial")
        partial_file.write_bytes(lines)
        partial_file.replace(file)
    return file


def _agent(given: Any) -> Any:
    if isinstance(given, str | Mapping):
        return given
    if callable(given):
        return path_of(given)
    if isinstance(given, Sequence):
        return {"command": [str(word) for word in given]}
    raise ConfigError(
        f"agent: is a {type(given).__name__}; a function, module:function, the words of a command, or `remote` are accepted"
    )


def _reward(given: Any) -> Any:
    if isinstance(given, str | Mapping):
        return given
    if not callable(given):
        raise ConfigError(
            f"reward: is a {type(given).__name__}; a function, a kind, or settings are accepted"
        )
    return {"kind": "function", "function": path_of(given), "name": function_name(given)}
