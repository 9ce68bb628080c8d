"""A filter of one's own: a function that gets a complete group and gives the reason to leave it out, or `None`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollwright.cancellation import is_asked_for
from rollwright.errors import ConfigError, RollwrightError
from rollwright.registry import import_object, is_path
from rollwright.rollout.filters.base import Action, Filter
from rollwright.rollout.filters.catching import ZeroVariance
from rollwright.trajectory import Trajectory

GroupFunction = Callable[[Sequence[Trajectory]], "str | None"]


@dataclass(frozen=True)
class OwnTest:
    """Catches the groups that the function gives a reason for."""

    name: str
    function: GroupFunction

    def catches_group(self, group: Sequence[Trajectory]) -> bool:
        return self.reason(group) is not None

    def reason(self, group: Sequence[Trajectory]) -> str | None:
        try:
            return self.function(group)
        except BaseException as error:
            if is_asked_for(error):
                raise
            where = group[0].group_id if group else "without members"
            raise RollwrightError(
                f"group_filter: {self.name} raised {type(error).__name__} for group {where}: {error}"
            ) from error


def group_filter(name: str) -> Filter:
    """`zero_variance`, or a user's own function as `module:function`."""
    if name == ZeroVariance.name:
        return Filter(ZeroVariance(), Action.DROP)
    if not is_path(name):
        raise ConfigError(
            f"group_filter: unknown `{name}`; known: {ZeroVariance.name}, or module:function; see also `filters`"
        )
    try:
        chosen = import_object(name)
    except (ConfigError, ImportError) as error:
        raise ConfigError(f"group_filter: `{name}` cannot be imported: {error}") from error
    if not callable(chosen):
        raise ConfigError(f"group_filter: `{name}` is a {type(chosen).__name__}, not a function")
    return Filter(OwnTest(name, chosen), Action.DROP)
