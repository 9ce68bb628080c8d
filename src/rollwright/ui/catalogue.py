"""The runs that a page shows: run folders below the given ones, and stores by their addresses.

Invariant: a run is only ever found by its id in this catalogue; no path comes from a request.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rollwright.addresses import check_address, redacted
from rollwright.errors import ConfigError
from rollwright.run.folder import CONFIG
from rollwright.run.trajectory_log import TRAJECTORIES
from rollwright.store.opening import STORES, scheme_of, sqlite_path
from rollwright.ui.folder_source import FolderSource
from rollwright.ui.store_source import StoreSource

DEPTH = 3
"""Folders below the given one in which runs are looked for."""

LOOK_SECONDS = 2.0
"""Time between two looks for new runs."""

MOST_RUNS = 2000

SQLITE = b"SQLite format 3\0"
"""First bytes of a store's file."""

Source = FolderSource | StoreSource


class Catalogue:
    """`places`: folders with runs, run folders, files of stores, addresses of stores."""

    def __init__(self, places: Sequence[str], prices: tuple[float, float] | None = None) -> None:
        self._folders: list[Path] = []
        self._prices = prices
        self._sources: dict[str, Source] = {}
        self._looked = float("-inf")
        for place in places:
            check_address(place)
            path = sqlite_path(place)
            if path is not None and not path.is_file():
                self._folders.append(path)
                continue
            _check_store(place, path)
            name = f"store {len(self._sources) + 1}"
            self._sources[name] = StoreSource(place, name, prices)

    def sources(self) -> list[Source]:
        """All runs, those of folders in the order of their names."""
        self._look()
        return list(self._sources.values())

    def find(self, name: str) -> Source | None:
        if name not in self._sources:
            self._look()
        return self._sources.get(name)

    def missing(self) -> list[str]:
        """Given folders that do not exist yet."""
        return [f"{each}: there is no such folder yet" for each in self._folders if not each.is_dir()]

    def _look(self) -> None:
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        found: dict[str, Path] = {}
        for folder in self._folders:
            if _is_run(folder):
                found[_free(folder.resolve().name, found)] = folder
                continue
            for path in _runs_below(folder):
                found[_free(str(path.relative_to(folder)), found)] = path
        for name, source in list(self._sources.items()):
            if isinstance(source, FolderSource) and found.get(name) != source.path:
                source.close()
                del self._sources[name]
        for name, path in list(found.items())[:MOST_RUNS]:
            if name not in self._sources:
                self._sources[name] = FolderSource(path, name, self._prices)


def _check_store(place: str, file: Path | None) -> None:
    """Refuse an address that no store has, and a file of another kind."""
    if file is None and not STORES.knows(scheme_of(place)):
        raise ConfigError(
            f"{redacted(place)}: is neither a folder nor a store; accepted: a folder, a store's file, http://…, postgresql://…"
        )
    if file is not None:
        with file.open("rb") as opened:
            if opened.read(len(SQLITE)) != SQLITE:
                raise ConfigError(f"{file}: is neither a folder with runs nor the file of a store")


def _free(name: str, taken: dict[str, Path]) -> str:
    """The name, with a number behind it if two given folders have runs of that name."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / TRAJECTORIES).is_file()


def _runs_below(folder: Path, depth: int = DEPTH) -> list[Path]:
    try:
        below = sorted(
            Path(each.path) for each in os.scandir(folder) if each.is_dir() and not each.name.startswith(".")
        )
    except OSError:
        return []
    found: list[Path] = []
    for each in below:
        if _is_run(each):
            found.append(each)
        elif depth > 1:
            found += _runs_below(each, depth - 1)
    return found
