"""Folders that are named by a number, such as checkpoints and weights, of which the last ones are kept."""

import shutil
from pathlib import Path


def numbered(place: Path) -> list[Path]:
    """The folders in it that are named by a number, the highest last."""
    found = [each for each in place.iterdir() if each.name.isdigit()] if place.is_dir() else []
    return sorted(found, key=lambda each: int(each.name))


def keep_last(place: Path, count: int) -> None:
    for old in numbered(place)[:-count]:
        shutil.rmtree(old)
