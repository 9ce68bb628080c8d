"""Loads the configuration of a command that plays, and refuses what can be refused before anything that plays is imported."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollwright.config import RunConfig


def load_to_play(config: Path, overrides: list[str] | None) -> "RunConfig":
    """Load a configuration whose tags are known."""
    from rollwright.config import load

    settings = load(config, overrides or [])
    check_tags_known(settings)
    return settings


def check_tags_known(settings: "RunConfig") -> None:
    from rollwright.envs.registry import spec
    from rollwright.errors import ConfigError

    managers = {"train_env_manager": settings.train_env_manager, "val_env_manager": settings.val_env_manager}
    for name, manager in managers.items():
        for tag in manager.tags if manager is not None else ():
            custom = settings.custom_envs.get(tag)
            env_type = None if custom is None else custom.env_type
            try:
                if custom is None or custom.tasks is None:
                    spec(env_type or tag)
            except ConfigError as error:
                key = f"custom_envs.{tag}.env_type" if env_type else f"{name}.tags"
                raise ConfigError(f"{key}: {error}") from error
