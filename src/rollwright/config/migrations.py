"""Schema version of configuration files, and the migrations from older versions.

Invariants: a migration changes names and shapes, never the meaning of a file. A file without `schema_version` is of the first
version or needs no change. A file of a newer release is an error.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollwright.errors import ConfigError

KEY = "schema_version"
FIRST = 1
"""Version of files without `schema_version`."""


@dataclass(frozen=True)
class Migration:
    """Migration from one version to the next."""

    to: int
    what: str
    """Description for users."""
    content: Callable[[dict[str, Any]], dict[str, Any]]
    text: Callable[[str], str]
    """The same change in the text of a file, with its comments; may leave unknown spellings unchanged."""


def _split_betas(content: dict[str, Any]) -> dict[str, Any]:
    training = content.get("training")
    if not isinstance(training, Mapping) or "betas" not in training:
        return content
    changed: dict[str, Any] = {}
    for key, value in training.items():
        if key == "betas" and isinstance(value, list) and len(value) == 2:
            changed |= {"beta1": value[0], "beta2": value[1]}
        else:
            changed[key] = value
    return {**content, "training": changed}


_BETAS = re.compile(r"^(\s+)betas:\s*\[\s*([^,\]]+?)\s*,\s*([^,\]]+?)\s*\](.*)$", re.MULTILINE)


def _split_betas_in_text(text: str) -> str:
    return _BETAS.sub(r"\1beta1: \2\4\n\1beta2: \3", text)


MIGRATIONS = (
    Migration(2, "training.betas is training.beta1 and training.beta2", _split_betas, _split_betas_in_text),
)

CURRENT = MIGRATIONS[-1].to


def version_of(content: Mapping[str, Any], source: str) -> int:
    found = content.get(KEY, FIRST)
    if not isinstance(found, int) or isinstance(found, bool) or found < FIRST:
        raise ConfigError(
            f"{source}: {KEY}: got {found!r}; a whole number from {FIRST} to {CURRENT} is accepted"
        )
    if found > CURRENT:
        raise ConfigError(
            f"{source}: {KEY}: {found} is of a newer release; this one knows up to {CURRENT}. Install that release, or go "
            "back with `rollwright config rollback`"
        )
    return found


def migrated(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Content in the current version, without `schema_version`."""
    version = version_of(content, source)
    found = {key: value for key, value in content.items() if key != KEY}
    for step in MIGRATIONS:
        if step.to > version:
            found = step.content(found)
    return found
