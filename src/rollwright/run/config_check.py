"""Checks of a run's settings that need no run: nothing is written, no model is loaded and no engine is asked.

Always true: settings that pass make a run, unless the machine changes in between or an engine refuses; and what is wrong
is told in the line that making the run would have told.
"""

from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.rollout.filters import build_filters
from rollwright.run.build import SettingsTable, build_curriculum
from rollwright.run.build_teams import check_policies


def check_config(config: RunConfig, *, ray: str | None = None) -> None:
    """Raises what is wrong: tags, their settings and levels, the strategy, filters, teams, policies, models. `ray`: the
    address of the cluster that the run would play on."""
    check_tags(config)
    SettingsTable(config)
    build_curriculum(config)
    for manager in (config.train_env_manager, config.val_env_manager):
        if manager is not None:
            build_filters(manager)
    check_policies(config)
    if ray is not None:
        check_ray(ray)


def check_tags(config: RunConfig) -> None:
    if not config.tags:
        raise ConfigError("train_env_manager: nothing to play; give this, val_env_manager, or both")


def check_ray(address: str) -> None:
    """Whether Ray is installed, and this may be the address of a cluster."""
    try:
        from rollwright.run.ray_fleet import RayCluster
    except ImportError as error:
        raise ConfigError("ray: is not installed; install rollwright[ray]") from error
    RayCluster(address)
