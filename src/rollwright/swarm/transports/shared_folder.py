"""Files in a folder that strangers can write to, accessed through directory descriptors alone.

Invariants:
- Below the root, which the user chose, no link is followed: every component is opened relative to its parent's descriptor,
  and only if it is itself a folder. A component that is swapped between two calls is refused, or is still the old one.
- A file is judged by its open descriptor, never by its name: only a regular file with one hard link that belongs to the
  owner of its folder is read, up to a limit. Pipes and devices never block.
- A file is written under a random, new name, then renamed. Only regular files of this process's user are removed, and
  removing a name never follows it.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from rollwright.errors import RollwrightError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial\Z")
"""Names of files under construction."""

OWN_MODE = 0o755
"""Mode of a folder with one writer: all users may read it."""

_FILE_MODE = 0o644
"""Mode of a file with one writer."""


class UnacceptableFile(RollwrightError):
    """An entry that must not be used."""


class SharedFolder:
    """An open folder; a context manager that closes its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self.owner = found.st_uid
        self.mode = stat.S_IMODE(found.st_mode)

    @classmethod
    def root(cls, path: Path) -> "SharedFolder":
        """Open the folder that the user chose; it alone may be a link."""
        return cls(os.open(path, _FOLDER))

    def __enter__(self) -> "SharedFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def folder(self, name: str) -> "SharedFolder":
        """Open a subfolder; raise `FileNotFoundError`, or `UnacceptableFile` for any other kind of entry."""
        try:
            return SharedFolder(os.open(_component(name), _FOLDER | os.O_NOFOLLOW, dir_fd=self._descriptor))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
                raise UnacceptableFile(f"{name}: is a link or a file where a folder is expected") from error
            raise

    def make_folder(self, name: str, *, shared: bool) -> "SharedFolder":
        """Open a subfolder, creating it if it is missing. A `shared` one is writable for the users that can write to this
        one, and only the owner of an entry can remove it."""
        try:
            os.mkdir(_component(name), 0o777 if shared else OWN_MODE, dir_fd=self._descriptor)
        except FileExistsError:
            return self.folder(name)
        made = self.folder(name)
        if self.mode & _OTHERS_WRITE and made.owner == os.geteuid():
            # Several users share: they must see the files, whatever this user's umask is.
            mode = self.mode | stat.S_ISVTX if shared else OWN_MODE
            with contextlib.suppress(OSError):  # not every mount has modes
                os.fchmod(made._descriptor, mode)
                made.mode = mode
        return made

    def entries(self) -> Iterator[str]:
        """Iterate over the names in file system order. Has its own descriptor, so it may outlive this object."""
        with os.scandir(self._descriptor) as found:
            for entry in found:
                yield entry.name

    def read(self, name: str, limit: int, *, owner: int | None = None) -> bytes | None:
        """Read at most `limit` bytes of a regular file of this folder's owner, or of `owner`; `None` if it is missing."""
        try:
            handle = os.open(_component(name), _READ, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:  # a link, a socket, or a file that only others may read
            raise UnacceptableFile(f"{name}: {error.strerror}") from error
        try:
            found = os.fstat(handle)
            if not _is_plain(found, self.owner if owner is None else owner):
                raise UnacceptableFile(f"{name}: not a plain file of its owner")
            return _read_up_to(handle, limit)
        finally:
            os.close(handle)

    def write(self, name: str, content: bytes, *, into: "SharedFolder | None" = None) -> None:
        """Write a file atomically into this folder, or `into` another one on the same disk."""
        partial = f".{secrets.token_hex(16)}.partial"
        handle = os.open(partial, _CREATE, _FILE_MODE, dir_fd=self._descriptor)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                if self.mode & stat.S_IROTH:
                    with contextlib.suppress(OSError):
                        os.fchmod(handle, _FILE_MODE)
            target = self if into is None else into
            os.rename(partial, _component(name), src_dir_fd=self._descriptor, dst_dir_fd=target._descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=self._descriptor)
            raise

    def user(self) -> int:
        """The owner of files that this process creates here: a mount may map user ids."""
        partial = f".{secrets.token_hex(16)}.partial"
        handle = os.open(partial, _CREATE, _FILE_MODE, dir_fd=self._descriptor)
        try:
            return os.fstat(handle).st_uid
        finally:
            os.close(handle)
            os.unlink(partial, dir_fd=self._descriptor)

    def stat_own(self, name: str, user: int) -> os.stat_result | None:
        """Stat a regular file of the user; `None` if there is no such file."""
        try:
            found = os.stat(_component(name), dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return None
        return found if _is_plain(found, user) else None

    def remove(self, name: str, user: int) -> bool:
        """Remove a regular file of the user; return whether there was one."""
        if self.stat_own(name, user) is None:
            return False
        try:
            os.unlink(_component(name), dir_fd=self._descriptor)
        except OSError:
            return False
        return True


def _component(name: str) -> str:
    """Return the name if it is a single path component."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise UnacceptableFile(f"{name!r}: not the name of a file")
    return name


def _is_plain(found: os.stat_result, owner: int) -> bool:
    # A hard link to another user's file would make it look as if its owner had put it here.
    return stat.S_ISREG(found.st_mode) and found.st_uid == owner and found.st_nlink <= 1


def _read_up_to(handle: int, limit: int) -> bytes:
    parts, left = [], limit
    while left > 0 and (part := os.read(handle, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
