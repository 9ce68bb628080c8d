"""Migrates and restores configuration files; every change can be undone.

Invariants: before a file changes, its bytes are in a backup beside it, named by the time (`NAME.20250131T120000Z.bak`), with
the installed versions of all packages (`….lock`). A file is replaced atomically, so that a crash leaves the old or the new
one. A rollback restores the exact bytes, and is itself a change with a backup.
"""

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import yaml

from rollwright.config.loading import build, read_content
from rollwright.config.migrations import CURRENT, KEY, MIGRATIONS, migrated, version_of
from rollwright.errors import ConfigError

_STAMP = "%Y%m%dT%H%M%SZ"
_BACKUP = re.compile(r"\.(\d{8}T\d{6}Z)(?:-(\d+))?\.bak$")


@dataclass(frozen=True)
class Migrated:
    """Result of a migration."""

    before: int
    after: int
    changes: tuple[str, ...]
    backup: Path | None
    """`None` if nothing had to change."""
    text: str
    """New text of the file."""
    comments_lost: bool = False


@dataclass(frozen=True)
class RolledBack:
    """Result of a rollback."""

    restored: Path
    """Backup whose bytes the file has now."""
    backup: Path
    """Backup of the previous file."""
    dependencies: tuple[str, ...]
    """Packages with other versions at the time of the backup, in the syntax of `pip install`."""


def backups(file: Path) -> list[Path]:
    """Backups of the file, the oldest first."""
    found = [each for each in file.parent.glob(f"{_escaped(file.name)}.*.bak") if _BACKUP.search(each.name)]
    return sorted(found, key=_order)


def back_up(file: Path) -> Path:
    """Copy the file's bytes and the list of installed packages, and sync both to the disk."""
    stamp = datetime.now(UTC).strftime(_STAMP)
    place, number = file.with_name(f"{file.name}.{stamp}.bak"), 2
    while place.exists():  # several changes in a second
        place = file.with_name(f"{file.name}.{stamp}-{number}.bak")
        number += 1
    write(lock_of(place), "\n".join(installed()).encode() + b"\n")
    write(place, file.read_bytes())
    return place


def lock_of(backup: Path) -> Path:
    return backup.with_suffix(".lock")


def write(file: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash it has the old or the new bytes."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as to:
            to.write(content)
            to.flush()
            os.fsync(to.fileno())
        if file.exists():
            partial.chmod(file.stat().st_mode & 0o7777)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def migrate(file: Path, *, dry_run: bool = False) -> Migrated:
    """Rewrite the file in the current schema version; comments stay if possible."""
    content = read_content(file)
    before = version_of(content, str(file))
    text = file.read_text(encoding="utf-8")
    if content.get(KEY) == CURRENT:
        return Migrated(before, before, (), None, text)
    steps = [each for each in MIGRATIONS if each.to > before]
    wanted = {KEY: CURRENT, **migrated(content, str(file))}
    build(wanted, source=str(file))  # raises other errors of the file before anything changes
    new, lost = _edit_in_place(text, wanted), False
    if new is None:
        new, lost = yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True), "#" in text
    changes = tuple(each.what for each in steps if each.content(dict(content)) != content)
    if dry_run:
        return Migrated(before, CURRENT, changes, None, new, lost)
    backup = back_up(file)
    write(file, new.encode())
    return Migrated(before, CURRENT, changes, backup, new, lost)


def _edit_in_place(text: str, wanted: dict[str, object]) -> str | None:
    """The text with the changes made in place; `None` if the result would not be `wanted`."""
    for step in MIGRATIONS:
        text = step.text(text)
    text = re.sub(rf"^{KEY}:.*\n", "", text, flags=re.MULTILINE)
    lines = text.splitlines(keepends=True)
    head = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    new = "".join([*lines[:head], f"{KEY}: {CURRENT}\n", *lines[head:]])
    try:
        return new if yaml.safe_load(new) == wanted else None
    except yaml.YAMLError:
        return None


def rollback(file: Path, to: Path | None = None) -> RolledBack:
    """Restore the bytes of a backup; by default of the newest one."""
    found = backups(file)
    if to is not None and to not in found:
        raise ConfigError(f"{to}: is no backup of {file}; there are: {_names(found)}")
    if not found:
        raise ConfigError(f"{file}: has no backup, so it was never changed by `rollwright config`")
    chosen = to or found[-1]
    content = chosen.read_bytes()
    backup = back_up(file)
    write(file, content)
    return RolledBack(chosen, backup, other_versions(lock_of(chosen)))


def installed() -> list[str]:
    """Installed packages as `name==version`, sorted."""
    found = {each.metadata["Name"].lower(): each.version for each in distributions() if each.metadata["Name"]}
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def other_versions(lock: Path) -> tuple[str, ...]:
    """Entries of a lock file that are not installed in this version now."""
    try:
        then = lock.read_text(encoding="utf-8").split()
    except OSError:
        return ()
    now = set(installed())
    return tuple(each for each in then if each not in now)


def _order(backup: Path) -> tuple[str, int]:
    found = _BACKUP.search(backup.name)
    assert found is not None
    return found[1], int(found[2] or 1)


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _names(files: list[Path]) -> str:
    return ", ".join(each.name for each in files) or "none"
