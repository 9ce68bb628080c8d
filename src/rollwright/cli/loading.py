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

    for tag in settings.tags:
        custom = settings.custom_envs.get(tag)
        if custom is None or custom.tasks is None:
            spec(tag if custom is None or custom.env_type is None else custom.env_type)
