"""Environments by tag.

A tag is one of:
- a name that is built in, registered with `register`, or offered by an installed package as an entry point
  of the group `rollwright.envs` (an `EnvSpec`, or a factory);
- `gymnasium:<id>` or `reasoning_gym:<dataset>`;
- `module:factory`, any importable callable that returns an environment.

Nothing heavy is imported before an environment that needs it is made. Settings are checked against the
factory's signature, so a typo or a wrong type is one clear line.
"""

import asyncio
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, cast

import msgspec

from rollwright.envs.base import Env, EnvironmentFailure
from rollwright.envs.frozen_lake import FrozenLake
from rollwright.envs.grid_game import DEFAULT_MAX_STEPS
from rollwright.envs.nearest import suggestion
from rollwright.envs.sokoban import DIFFERENT_VOCAB, Sokoban
from rollwright.envs.threaded import wrap
from rollwright.errors import ConfigError

ENTRY_POINT_GROUP = "rollwright.envs"

Factory = Callable[..., Any]
"""Takes settings as keyword arguments and returns an `Env`, or a `SyncEnv` to be run in a thread."""


@dataclass(frozen=True)
class EnvSpec:
    """What is known of an environment before one is made."""

    tag: str
    description: str
    factory: Factory | str
    """The callable, or its path as `module:name`, imported when first needed."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings that hold unless the user gives others."""
    argument: str | None = None
    """What the factory takes first, before its settings: the part of a tag behind `gymnasium:`, say."""
    max_steps: int = DEFAULT_MAX_STEPS
    """Actions in an episode, unless the run says otherwise."""
    max_tokens_per_step: int = 128


_registered: dict[str, EnvSpec] = {
    spec.tag: spec
    for spec in (
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
}

_FAMILIES: Mapping[str, EnvSpec] = MappingProxyType(
    {
        "gymnasium": EnvSpec(
            "gymnasium:<id>",
            "a Gymnasium environment with discrete or text actions",
            "rollwright.envs.gymnasium_env:make_gymnasium",
            max_steps=100,
        ),
        "reasoning_gym": EnvSpec(
            "reasoning_gym:<dataset>",
            "one question of a reasoning-gym dataset",
            "rollwright.envs.reasoning:ReasoningGym",
            max_steps=1,
            max_tokens_per_step=1024,
        ),
    }
)
"""By what stands before the colon of their tags."""

PREFIXES: Mapping[str, str] = MappingProxyType({name: each.description for name, each in _FAMILIES.items()})
"""What can stand before the colon of a tag, and what it stands for."""


def register(spec: EnvSpec) -> None:
    """Adds an environment for this process; a tag that exists already is refused."""
    if ":" in spec.tag or not spec.tag:
        raise ConfigError(f"an environment tag must be a name without ':', got {spec.tag!r}")
    if spec.tag in _registered or spec.tag in _offered():
        raise ConfigError(f"environment tag {spec.tag!r} is taken; choose another name")
    _registered[spec.tag] = spec


def tags() -> list[str]:
    """The tags that are plain names; `PREFIXES` has the others."""
    return sorted({*_registered, *_offered()})


def spec(tag: str) -> EnvSpec:
    if tag in _registered:
        return _registered[tag]
    if tag in _offered():
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
    """A new environment; `config` goes over the defaults of its tag."""
    found = spec(tag)
    leading = () if found.argument is None else (found.argument,)
    try:
        factory = _imported(found.factory) if isinstance(found.factory, str) else found.factory
        settings = _checked(factory, {**found.config, **(config or {})}, len(leading))
        return _as_async(factory(*leading, **settings))
    except ConfigError as error:
        raise ConfigError(f"environment {tag}: {error}") from error
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        # its own code wants to end the process, which has others to serve
        raise EnvironmentFailure(
            f"environment {tag}: raised {type(error).__name__} when it was made"
        ) from error


def takes(tag: str, key: str) -> bool:
    """Whether environments of this tag have a setting of this name."""
    factory = spec(tag).factory
    parameters = _parameters(_imported(factory) if isinstance(factory, str) else factory)
    return any(parameter.name == key for parameter in parameters)


def _imported(path: str) -> Factory:
    module, _, name = path.partition(":")
    try:
        factory: Any = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ConfigError(f"no module named {error.name!r}{suggestion(module, _FAMILIES)}") from error
    except AttributeError as error:
        raise ConfigError(f"module {module!r} has no {name!r}") from error
    except SystemExit as error:
        raise ConfigError(f"module {module!r} ends the process when it is imported") from error
    if not callable(factory):
        raise ConfigError(f"{name!r} of module {module!r} cannot be called")
    return factory  # type: ignore[no-any-return]


def _checked(factory: Factory, settings: Mapping[str, Any], leading: int) -> dict[str, Any]:
    """The settings in the types that the factory declares; a `ConfigError` names the first that is wrong."""
    parameters = _parameters(factory)[leading:]
    named = {
        each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for key in settings:
        if key not in named and not takes_any:
            accepted = ", ".join(named) or "none"
            raise ConfigError(f"unknown setting {key!r}{suggestion(key, named)}; accepted: {accepted}")
    for name, each in named.items():
        if each.default is each.empty and name not in settings:
            raise ConfigError(f"needs the setting {name!r}")
    return {
        key: _converted(key, value, named[key].annotation) if key in named else value
        for key, value in settings.items()
    }


def _parameters(factory: Factory) -> Sequence[inspect.Parameter]:
    """Environments of one factory are made again and again."""
    return _cached_parameters(factory) if isinstance(factory, Hashable) else _read_parameters(factory)


def _read_parameters(factory: Factory) -> Sequence[inspect.Parameter]:
    try:
        signature = inspect.signature(factory, eval_str=True)
    except NameError:  # a type that is imported for type checkers only; the names still count
        signature = inspect.signature(factory)
    return tuple(signature.parameters.values())


_cached_parameters = lru_cache(maxsize=256)(_read_parameters)


def _converted(key: str, value: Any, declared: Any) -> Any:
    if declared is inspect.Parameter.empty:
        return value
    try:
        return msgspec.convert(value, declared)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").replace(" - at $", ", at ")
        raise ConfigError(f"{key}: {reason[0].lower()}{reason[1:]} (got {value!r})") from None
    except TypeError:  # a type that only the factory itself can check
        return value


_MEMBERS = ("instruction", "prompts", "reset", "step", "close")


def _as_async(made: Any) -> Env:
    kind = type(made)
    if any(getattr(kind, name, None) is None and getattr(made, name, None) is None for name in _MEMBERS):
        wanted = "instruction, prompts, reset(seed), step(answer) and close()"
        raise ConfigError(f"{kind.__name__} is not an environment; one has {wanted}")
    return cast(Env, made) if inspect.iscoroutinefunction(made.reset) else wrap(made)


@cache
def _offered() -> Mapping[str, Sequence[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, []).append(point)
    return found


@cache
def _from_entry_point(tag: str) -> EnvSpec:
    point, *others = _offered()[tag]
    if others:
        offers = ", ".join(each.value for each in (point, *others))
        raise ConfigError(f"environment tag {tag!r} is offered by more than one package: {offers}")
    loaded = point.load()
    if isinstance(loaded, EnvSpec):
        return dataclasses.replace(loaded, tag=tag)
    description = (inspect.getdoc(loaded) or f"from {point.value}").partition("\n")[0]
    return EnvSpec(tag, description, loaded)
