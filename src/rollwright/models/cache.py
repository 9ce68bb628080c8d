"""Where fetched models lie: one folder each, whole or not there at all."""

import os
import sys
from pathlib import Path

CACHE_VARIABLE = "ROLLWRIGHT_CACHE"
"""Environment variable that names another folder for everything that is fetched."""


def cache_folder() -> Path:
    """The folder of `ROLLWRIGHT_CACHE`, or the platform's place for what can be fetched again."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rollwright"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "rollwright"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollwright"


def model_folder(name: str) -> Path:
    """Where the model of that name lies once it has been fetched."""
    return cache_folder() / "models" / name


def is_fetched(name: str) -> bool:
    """A folder gets its name only when it is whole, so its existence says it all."""
    return model_folder(name).is_dir()
