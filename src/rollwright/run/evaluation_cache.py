"""Episodes that evaluations have played, kept by what they depend on: task, model, sampling and seed.

Always true: an entry is the trajectory of an episode that ended with a result; failures are not kept. Two episodes have the
same key only if the task's content, the environment and agent settings, the user's own modules that these name, the model,
the sampling and the draw are equal. A model in a local folder is known by its files, so that training it further makes
another model of it. An entry is written whole or not at all.
"""

import os
import re
from collections.abc import Iterator
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from rollwright import __version__
from rollwright.config import RunConfig
from rollwright.engines.settings import TorchPolicyConfig
from rollwright.errors import FormatError
from rollwright.rollout.episode import Episode
from rollwright.rollout.settings.agents import CommandAgentConfig
from rollwright.run.build_tasks import TagTasks
from rollwright.trajectory import Trajectory

FOLDER = ".evaluations"
"""Folder of the entries, beside the run folders."""

_OWN = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""`module:name` of a user's own code."""

_LOAD = (
    "request_timeout",
    "max_retries",
    "max_connections",
    "outage_patience",
    "routing",
    "threads",
    "max_batch",
    "compress",
    "token_limit",
)
"""Settings of policies that change how calls are made, and no answer."""


class EvaluationCache:
    """The entries of one evaluation's settings."""

    def __init__(self, folder: Path, config: RunConfig, tasks: dict[str, TagTasks]) -> None:
        self._folder = folder
        self._tasks = tasks
        self._rows = {tag: each.source("val") for tag, each in tasks.items()}
        self._settings = {tag: _settings_digest(config, tag) for tag in config.tags}
        """`None` for a tag whose episodes cannot be recognized."""

    def find(self, rollout_id: str, episode: Episode) -> bytes | None:
        """The trajectory of an equal episode, as this rollout's; `None`: there is none."""
        if (file := self._file(episode)) is None:
            return None
        try:
            found = Trajectory.from_bytes(file.read_bytes())
        except (FileNotFoundError, FormatError):
            return None
        found.rollout_id, found.group_id = rollout_id, episode.group_id
        return found.to_bytes()

    def keep(self, episode: Episode, trajectory: Trajectory) -> None:
        """Keep an episode's trajectory, unless there is one."""
        file = self._file(episode)
        if file is None or file.exists():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        partial.write_bytes(trajectory.to_bytes())
        partial.replace(file)

    def _file(self, episode: Episode) -> Path | None:
        settings = self._settings.get(episode.tag)
        if settings is None:
            return None
        level: Any = episode.seed
        if episode.tag in self._rows:
            level = self._rows[episode.tag].row(episode.seed)
        key = (settings, level, episode.seed, episode.member, episode.run_seed)
        name = _digest(key)
        return self._folder / name[:2] / f"{name}.rwt"


def _settings_digest(config: RunConfig, tag: str) -> str | None:
    custom = config.custom_envs.get(tag)
    if custom is not None and isinstance(custom.agent, CommandAgentConfig):
        return None  # what a command does depends on files that nobody names here
    team = config.orchestras.get(tag)
    manager = config.val_env_manager
    parts: dict[str, Any] = {
        "release": __version__,
        "tag": tag,
        "env": None
        if custom is None
        else custom.model_dump(mode="json", exclude={"tasks", "held_out", "tasks_fingerprint"}),
        "team": None if team is None else team.model_dump(mode="json"),
        "policies": {name: _identity(each) for name, each in config.policies.items()}
        if team is not None
        else {},
        "policy": _identity(config.policy),
        "agent": config.agent.model_dump(mode="json"),
        "gateway": config.gateway.model_dump(mode="json"),
        "sampling": config.sampling.model_dump(mode="json", exclude={"temperature", "top_p"}),
        "temperature": None if manager is None else (manager.temperature, manager.top_p),
        "sequence_length": config.sequence_length,
    }
    parts["code"] = [
        _source_digest(name) for name in _own_modules([parts["env"], parts["team"], parts["policy"]])
    ]
    return _digest(parts)


def _identity(policy: Any) -> dict[str, Any]:
    told: dict[str, Any] = policy.model_dump(mode="json", exclude=set(_LOAD))
    if isinstance(policy, TorchPolicyConfig) and (folder := Path(policy.model)).is_dir():
        files = sorted(each for each in folder.iterdir() if each.is_file())
        told["files"] = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return told


def _own_modules(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list):
        for each in data:
            yield from _own_modules(each)
    elif isinstance(data, str) and (found := _OWN.fullmatch(data)) is not None:
        yield found[1]


def _source_digest(module: str) -> str:
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return module
    file = None if spec is None or spec.origin is None else Path(spec.origin)
    return (
        module
        if file is None or not file.is_file()
        else blake2b(file.read_bytes(), digest_size=16).hexdigest()
    )


def _digest(data: Any) -> str:
    return blake2b(msgspec.json.encode(data, order="deterministic", enc_hook=str), digest_size=20).hexdigest()
