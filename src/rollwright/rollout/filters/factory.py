"""Builds filters from their settings."""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast

from rollwright.errors import ConfigError
from rollwright.rollout.filters.base import Action, Filter, Test
from rollwright.rollout.filters.filters import OwnTest, group_filter
from rollwright.rollout.filters.settings import FILTERS, AnyFilterConfig, OwnFilterConfig
from rollwright.rollout.settings import EnvManagerConfig

_METHODS = ("catches_turn", "catches", "catches_group", "caught_members")
"""The methods of which a test has at least one."""


def build_filters(manager: EnvManagerConfig) -> tuple[Filter, ...]:
    """The configured filters in their order; `group_filter` is the last one."""
    filters = [Filter(_test(each), Action(each.action), each.baseline) for each in manager.filters]
    if manager.group_filter is not None:
        filters.append(group_filter(manager.group_filter))
    return tuple(filters)


def _test(settings: AnyFilterConfig) -> Test:
    if isinstance(settings, OwnFilterConfig):
        return _own_test(settings)
    return cast(Test, FILTERS.find(settings.kind)(settings))


def _own_test(settings: OwnFilterConfig) -> Test:
    """A user-defined test; an exception in it is one line that names it."""
    name = settings.test
    found = FILTERS.find(name)
    if not isinstance(found, type) and callable(found):
        return OwnTest(name, FILTERS.function(name, **settings.options))
    test = FILTERS.make(name, **settings.options)
    methods = [each for each in (*_METHODS, "penalties", "reason") if callable(getattr(test, each, None))]
    if not set(methods) & set(_METHODS):
        raise ConfigError(f"filter {name}: has none of {', '.join(_METHODS)}")
    if settings.action == "penalise" and "penalties" not in methods:
        raise ConfigError(f"filter {name}: action `penalise` needs the method penalties(trajectory)")
    blamed = {each: _blamed(name, getattr(test, each)) for each in methods}
    return cast(Test, SimpleNamespace(name=getattr(test, "name", name), **blamed))


def _blamed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(looked_at: Any) -> Any:
        with FILTERS.blame(name):
            return method(looked_at)

    return call
