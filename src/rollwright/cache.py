"""The folder in which fetched models, indexes of task files and virtual environments are kept."""

import os
import sys
from pathlib import Path

CACHE_VARIABLE = "ROLLWRIGHT_CACHE"
"""Environment variable for another cache folder."""


def cache_folder() -> Path:
    """The folder of `ROLLWRIGHT_CACHE`, or the platform's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rollwright"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "rollwright"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollwright"
