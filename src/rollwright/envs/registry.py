"""Registry of environments by tag.

A tag is one of:
- a built-in name, a name registered with `register`, or an entry point of the group `rollwright.envs` in an installed
  package (an `EnvSpec` or a factory);
- a name of another package behind its prefix, such as `gymnasium:<id>`;
- `module:factory`, any importable callable that returns an environment.

Optional packages are imported only when an environment that needs them is created. Settings are checked against the
factory's signature, so a typo or a wrong type gives a one-line error.
"""

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from rollwright.envs.base import Env, EnvironmentFailure
from rollwright.envs.games.frozen_lake import FrozenLake
from rollwright.envs.games.grid_game import DEFAULT_MAX_STEPS
from rollwright.envs.games.sokoban import DIFFERENT_VOCAB, Sokoban
from rollwright.envs.threaded import wrap
from rollwright.errors import ConfigError
from rollwright.registry import Registry, checked_options, import_object, parameters_of, suggestion

Factory = Callable[..., Any]
"""Takes settings as keyword arguments and returns an `Env`, or a `SyncEnv`, which runs in a thread."""


@dataclass(frozen=True)
class EnvSpec:
    """Description of an environment: its factory and default settings."""

    tag: str
    description: str
    factory: Factory | str
    """The callable, or its path as `module:name`, imported on first use."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Default settings."""
    argument: str | None = None
    """First positional argument of the factory, such as the part of a tag after `gymnasium:`."""
    max_steps: int = DEFAULT_MAX_STEPS
    """Default action limit of an episode."""
    max_tokens_per_step: int = 128
    step_timeout: float | None = None
    """Seconds that `reset` or `step` may take where no setting says so; `None`: the run's limit."""
    plays_episodes: bool = False
    """Whether it plays whole episodes by itself; see `rollwright.envs.base.PlaysEpisodes`."""


_BUILT_IN = (
    EnvSpec("FrozenLake", "cross a 4x4 frozen lake without falling into a hole", FrozenLake),
    EnvSpec("SimpleSokoban", "push one box onto its target in a 6x6 room", Sokoban),
    EnvSpec(
        "LargerSokoban",
        "push two boxes onto targets in a 10x10 room",
        Sokoban,
        {"dim_room": [10, 10], "num_boxes": 2},
    ),
    EnvSpec(
        "SokobanDifferentGridVocab",
        "SimpleSokoban, the same rooms in other symbols",
        Sokoban,
        {"grid_vocab": DIFFERENT_VOCAB},
    ),
)

ENVIRONMENTS: Registry[EnvSpec | Factory] = Registry(
    "envs",
    "environment",
    {each.tag: each for each in _BUILT_IN},
    protocol="rollwright.envs.base:Env",
    key="custom_envs.TAG.env_type",
)

_FAMILIES: Mapping[str, EnvSpec] = MappingProxyType(
    {
        "gymnasium": EnvSpec(
            "gymnasium:<id>",
            "a Gymnasium environment with discrete or text actions",
            "rollwright.envs.adapters.gymnasium:make_gymnasium",
            max_steps=100,
        ),
        "harbor": EnvSpec(
            "harbor:<path>",
            "a Harbor or Terminal-Bench task folder, or a folder of them, in boxes",
            "rollwright.envs.harbor.environment:HarborEnv",
            max_steps=50,
            max_tokens_per_step=1024,
            step_timeout=3600.0,
        ),
        "inspect": EnvSpec(
            "inspect:<file@task>",
            "a task of Inspect, by its own solver and scorer; plays whole episodes; does not fork; reward at the end only",
            "rollwright.envs.adapters.inspect_tasks:InspectTask",
            max_steps=1,
            max_tokens_per_step=1024,
            step_timeout=600.0,
        ),
        "nemo_gym": EnvSpec(
            "nemo_gym:<url>",
            "a resources server of NeMo-Gym and a dataset; plays whole episodes; does not fork; reward at the end only",
            "rollwright.envs.adapters.nemo_gym:NemoGym",
            max_steps=1,
            max_tokens_per_step=1024,
            step_timeout=600.0,
        ),
        "reasoning_gym": EnvSpec(
            "reasoning_gym:<dataset>",
            "one question of a reasoning-gym dataset",
            "rollwright.envs.adapters.reasoning_gym:ReasoningGym",
            max_steps=1,
            max_tokens_per_step=1024,
        ),
        "textarena": EnvSpec(
            "textarena:<game>",
            "a game of TextArena, alone or against an opponent; forks; reward at the end only",
            "rollwright.envs.adapters.textarena:TextArena",
            max_steps=50,
            max_tokens_per_step=512,
        ),
        "openenv": EnvSpec(
            "openenv:<url or folder>",
            "an OpenEnv server, also one that is started here; does not fork",
            "rollwright.envs.adapters.openenv:OpenEnv",
            max_steps=50,
            max_tokens_per_step=512,
        ),
        "verifiers": EnvSpec(
            "verifiers:<task set>",
            "an environment of verifiers, played by its own rollout; one reward at the end; does not fork",
            "rollwright.envs.adapters.verifiers:Verifiers",
            max_steps=50,
            max_tokens_per_step=1024,
            step_timeout=600.0,
            plays_episodes=True,
        ),
    }
)
"""Environment families by the prefix of their tags."""

PREFIXES: Mapping[str, str] = MappingProxyType({name: each.description for name, each in _FAMILIES.items()})
"""Prefixes of tags and their descriptions."""


def register(spec: EnvSpec) -> None:
    """Registers an environment in this process; an existing tag is refused."""
    ENVIRONMENTS.register(spec.tag, spec)


def tags() -> list[str]:
    """All tags without a prefix; see `PREFIXES` for the others."""
    return sorted(ENVIRONMENTS.names())


def spec(tag: str) -> EnvSpec:
    """The spec of a tag; raises a `ConfigError` that lists the known tags."""
    found = ENVIRONMENTS.kinds.get(tag)
    if isinstance(found, EnvSpec):
        return found
    if tag in ENVIRONMENTS.offered():
        return _from_entry_point(tag)
    before, _, behind = tag.partition(":")
    if before and behind:
        family = _FAMILIES.get(before)
        if family is None:
            return EnvSpec(tag, f"{behind} of module {before}", factory=tag)
        return dataclasses.replace(family, tag=tag, argument=behind)
    known = [*tags(), *(family.tag for family in _FAMILIES.values())]
    raise ConfigError(
        f"unknown environment {tag!r}{suggestion(tag, known)}; known: {', '.join(known)}, or module:factory"
    )


def make(tag: str, config: Mapping[str, Any] | None = None) -> Env:
    """Creates an environment; `config` overrides the default settings of its tag."""
    found = spec(tag)
    leading = () if found.argument is None else (found.argument,)
    try:
        factory = _resolve_factory(found.factory)
        settings = checked_options(factory, {**found.config, **(config or {})}, len(leading))
        return _as_async(factory(*leading, **settings))
    except ConfigError as error:
        raise ConfigError(f"environment {tag}: {error}") from error
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        # the environment's own code must not end a process that serves other rollouts
        raise EnvironmentFailure(
            f"environment {tag}: its constructor raised {type(error).__name__}"
        ) from error


def accepts_setting(tag: str, key: str) -> bool:
    """Whether environments of this tag have a setting of this name."""
    return any(parameter.name == key for parameter in parameters_of(_resolve_factory(spec(tag).factory)))


def _resolve_factory(factory: Factory | str) -> Factory:
    if not isinstance(factory, str):
        return factory
    try:
        found = import_object(factory)
    except ConfigError as error:
        raise ConfigError(f"{error}{suggestion(factory.partition(':')[0], _FAMILIES)}") from error
    if not callable(found):
        raise ConfigError(f"{factory} is not callable")
    return found  # type: ignore[no-any-return]


_MEMBERS = ("instruction", "prompts", "reset", "step", "close")


def _as_async(made: Any) -> Env:
    kind = type(made)
    if any(getattr(kind, name, None) is None and getattr(made, name, None) is None for name in _MEMBERS):
        wanted = "instruction, prompts, reset(seed), step(answer) and close()"
        raise ConfigError(f"{kind.__name__} is not an environment; it needs {wanted}")
    return cast(Env, made) if inspect.iscoroutinefunction(made.reset) else wrap(made)


def _from_entry_point(tag: str) -> EnvSpec:
    found = ENVIRONMENTS.find(tag)
    if isinstance(found, EnvSpec):
        return dataclasses.replace(found, tag=tag)
    offer = ENVIRONMENTS.offered()[tag][0].value
    description = (inspect.getdoc(found) or f"from {offer}").partition("\n")[0]
    return EnvSpec(tag, description, found)
