"""Group filters: which complete groups are left out of a batch, and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from rollwright.errors import ConfigError
from rollwright.trajectory import Trajectory

GroupFilter = Callable[[Sequence[Trajectory]], str | None]
"""Gives the reason to leave a complete group out, or `None` to keep it."""


@dataclass(frozen=True)
class ZeroVariance:
    """Leaves out groups whose members all have the same score: relative to the group, none is better."""

    def __call__(self, group: Sequence[Trajectory]) -> str | None:
        scores = {trajectory.score for trajectory in group}
        return "zero_variance" if len(scores) == 1 and len(group) > 1 else None


_KNOWN: dict[str, GroupFilter] = {"zero_variance": ZeroVariance()}


def group_filter(name: str | None) -> GroupFilter | None:
    """A filter by name, or a user's own function as `module:function`."""
    if name is None:
        return None
    if name in _KNOWN:
        return _KNOWN[name]
    module, found, function = name.partition(":")
    if not found:
        raise ConfigError(f"group_filter: unknown `{name}`; known: {', '.join(_KNOWN)}, or module:function")
    try:
        chosen = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"group_filter: `{name}` cannot be imported: {error}") from error
    if not callable(chosen):
        raise ConfigError(f"group_filter: `{name}` is a {type(chosen).__name__}, not a function")
    return chosen  # type: ignore[no-any-return]
