"""Where objects are: a folder, or a bucket behind fsspec (S3 and what speaks like it).

Invariants: a `put` that has returned is durable, and visible whole or not at all; nothing blocks the event loop, because all
work is done by a pool of threads; an object that is not there is `None`, and any other failure is `StoreUnavailable`, whose
text has no secret. Credentials come from where the library finds them (environment, files, roles), never from the address.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

from rollwright.errors import ConfigError
from rollwright.store.errors import StoreUnavailable

THREADS = 32
"""Objects read or written at the same time: a request takes some milliseconds, nearly all of it waiting."""

PARTIAL = ".partial"
"""Ends the name of a file that is being written."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class StoredObject(NamedTuple):
    """An object in a listing."""

    key: str
    age: float
    """Seconds since it was written."""


class Bucket(ABC):
    """Objects by key; keys are relative paths of safe characters."""

    address: str
    """Where it is, for people."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="objects")

    async def put(self, key: str, data: bytes) -> None:
        await self._run(key, self._put, key, data)

    async def get(self, key: str) -> bytes | None:
        """The object, or `None`."""
        return await self._run(key, self._get, key)

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete what there is of these."""
        await asyncio.gather(*(self._run(key, self._delete, key) for key in keys))

    async def objects(self, folder: str) -> list[StoredObject]:
        """All objects below a folder."""
        return await self._run(folder, self._listed, folder)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, key: str, work: Callable[Parameters, Result], *given: Parameters.args, **more: Parameters.kwargs
    ) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: work(*given, **more)
            )
        except Exception as error:
            # Libraries raise anything, and may quote a request with its headers: only the kind of error is told.
            text = error.strerror if isinstance(error, OSError) and error.strerror else ""
            what = f"{type(error).__name__}{f': {text}' if text else ''}"
            raise StoreUnavailable(f"{self.address}/{key}: {what}") from error

    @abstractmethod
    def _put(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def _get(self, key: str) -> bytes | None: ...

    @abstractmethod
    def _delete(self, key: str) -> None: ...

    @abstractmethod
    def _listed(self, folder: str) -> list[StoredObject]: ...


class FolderBucket(Bucket):
    """Files below a folder, local or mounted."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.address = root.as_uri()
        self._root = root

    def _put(self, key: str, data: bytes) -> None:
        path = self._root / key
        handle, partial = self._new_file(path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(partial).replace(path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        # The names are durable with their folders, up to the one that was there before.
        for folder in (path.parent, *path.parent.relative_to(self._root).parents):
            _flush(self._root / folder)

    def _get(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None

    def _new_file(self, folder: Path) -> tuple[int, str]:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                return tempfile.mkstemp(suffix=PARTIAL, dir=folder)
            except FileNotFoundError:  # another process has just removed the empty folder
                continue

    def _delete(self, key: str) -> None:
        path = self._root / key
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or gone already
            path.parent.rmdir()

    def _listed(self, folder: str) -> list[StoredObject]:
        now = time.time()
        found = [each for each in (self._root / folder).rglob("*") if each.is_file()]
        return [
            StoredObject(each.relative_to(self._root).as_posix(), now - each.stat().st_mtime)
            for each in found
        ]


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FsspecBucket(Bucket):
    """Whatever fsspec knows the scheme of; `s3://bucket/prefix` above all."""

    def __init__(self, address: str) -> None:
        super().__init__()
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(
                "trajectories: object storage needs fsspec: install rollwright[objects]"
            ) from error
        self.address = address.rstrip("/")
        options: dict[str, Any] = (
            {"config_kwargs": {"max_pool_connections": THREADS}} if address.startswith("s3") else {}
        )
        try:
            self._files, root = fsspec.core.url_to_fs(
                address, use_listings_cache=False, skip_instance_cache=True, **options
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(f"trajectories: {self.address}: {error}") from error
        self._root = root.rstrip("/")

    def _put(self, key: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{key}", data)

    def _get(self, key: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(f"{self._root}/{key}"))
        except FileNotFoundError:
            return None

    def _delete(self, key: str) -> None:
        try:
            self._files.rm_file(f"{self._root}/{key}")
        except FileNotFoundError:
            return

    def _listed(self, folder: str) -> list[StoredObject]:
        now = time.time()
        try:
            found = self._files.find(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return []
        return [
            StoredObject(name[len(self._root) :].lstrip("/"), now - _written(about))
            for name, about in found.items()
        ]


def _written(about: dict[str, Any]) -> float:
    """When an object was written; an unknown time counts as now, so that it is not taken for old."""
    for name in ("LastModified", "mtime", "created", "last_modified"):
        when = about.get(name)
        if when is not None:
            return float(when) if isinstance(when, int | float) else float(when.timestamp())
    return time.time()


def open_bucket(address: str) -> Bucket:
    """The bucket of an address: `file:///path`, a path, `s3://bucket/prefix`, or another that fsspec knows."""
    parts = urlsplit(address)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            "trajectories: the address has more than a place; give credentials by the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3) or a file of the library, never in the address"
        )
    if parts.scheme in ("", "file"):
        path = Path(parts.path if parts.scheme else address)
        if parts.netloc or not path.is_absolute():
            raise ConfigError(
                f"trajectories: {address}: not the absolute path of a folder, as file:///data/objects is"
            )
        return FolderBucket(path)
    return FsspecBucket(address)
