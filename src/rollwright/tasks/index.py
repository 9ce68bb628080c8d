"""Line index of a text file: where each row begins, on disk, so that a row of a huge file is read by itself.

The file is read once: every row is checked, its offset written down and the whole hashed. The index lies in the cache
folder under the name of the file's path and format, and is used again while the file's size, time of change and inode
are the same. It is mapped into memory, so ten million rows take 240 MB of disk and next to none of memory, shared by all
processes of the machine. A reader never sees half an index: it is written beside its place and renamed.
"""

import csv
import io
import mmap
import os
import secrets
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import msgspec

from rollwright.errors import ConfigError

Row = dict[str, Any]

_COLUMNS = 3
"""Numbers that are kept of each row: its offset, its line, a hash of its text."""

_MAGIC = b"rwtasks1"
"""Names the layout; another one is built anew."""


class TaskError(ConfigError):
    """A file of tasks cannot be used; the message names the file and the line."""


class _Header(msgspec.Struct, frozen=True):
    """What an index was made of."""

    size: int
    changed_ns: int
    inode: int
    checksum: str
    rows: int
    columns: list[str]
    """Of a CSV file; empty for others."""


class TextFile:
    """Rows of a JSONL or CSV file, by number."""

    def __init__(self, path: Path, cache: Path, kind: str) -> None:
        self._path = path
        self._kind = kind
        self._local = threading.local()
        try:
            self._header, self._table = _load_or_build(path, cache, kind)
        except OSError as error:
            raise TaskError(f"{path}: cannot be read: {error.strerror}") from error

    def __len__(self) -> int:
        return self._header.rows

    @property
    def fingerprint(self) -> str:
        """Changes when the content changes."""
        return self._header.checksum

    def key(self, number: int) -> int:
        """A hash of the row's text."""
        return self._table[number * _COLUMNS + 2]

    def row(self, number: int) -> Row:
        place = number * _COLUMNS
        begin, line_number = self._table[place], self._table[place + 1]
        end = self._table[place + _COLUMNS] if number + 1 < len(self) else self._header.size
        # `pread` moves no shared position, so threads need no lock; the descriptor is per thread only because closing
        # it belongs to the process that opened it.
        descriptor = getattr(self._local, "descriptor", None)
        if descriptor is None:
            descriptor = self._local.descriptor = _Descriptor(self._path)
        data = os.pread(descriptor.number, end - begin, begin)
        return _parse(self._kind, data, self._path, line_number, self._header.columns)


class _Descriptor:
    """An open file that is closed with its last reference."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.number)


def _load_or_build(path: Path, cache: Path, kind: str) -> tuple[_Header, memoryview]:
    status = path.stat()
    name = blake2b(f"{kind}\0{path.resolve()}".encode(), digest_size=16).hexdigest()
    place = cache / "tasks" / f"{name}.index"
    with suppress(OSError, msgspec.DecodeError, ValueError, struct.error):
        header, table = _map(place)
        if (header.size, header.changed_ns, header.inode) == (
            status.st_size,
            status.st_mtime_ns,
            status.st_ino,
        ):
            return header, table
    header, built = _build(path, kind)
    try:
        _write(place, header, built)
        return _map(place)
    except OSError:  # a cache that cannot be written costs memory, and no more
        return header, memoryview(built)


def _map(place: Path) -> tuple[_Header, memoryview]:
    with place.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if mapped[: len(_MAGIC)] != _MAGIC:
        raise ValueError("another layout")
    (length,) = struct.unpack_from("<Q", mapped, len(_MAGIC))
    begin = len(_MAGIC) + 8 + length
    header = msgspec.json.decode(mapped[len(_MAGIC) + 8 : begin].rstrip(b" "), type=_Header)
    table = memoryview(mapped)[begin:].cast("Q")
    if len(table) != _COLUMNS * header.rows:
        raise ValueError("cut off")
    return header, table


def _write(place: Path, header: _Header, table: "array[int]") -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode(header)
    encoded += b" " * (
        -(len(_MAGIC) + 8 + len(encoded)) % 8
    )  # the table begins at a multiple of its items' size
    beside = place.with_name(f"{place.name}.{secrets.token_hex(6)}")
    try:
        with beside.open("wb") as file:
            file.write(_MAGIC + struct.pack("<Q", len(encoded)) + encoded)
            table.tofile(file)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def _build(path: Path, kind: str) -> tuple[_Header, "array[int]"]:
    """Reads the whole file, and checks every row of it."""
    table, checksum = array("Q"), blake2b(digest_size=16)
    columns: list[str] = []
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        for begin, number, data in _records(kind, file, checksum.update):
            if kind == "csv" and not columns:
                columns = _csv_columns(data, path)
                continue
            if not data.strip():
                continue
            _parse(kind, data, path, number, columns)
            table.extend((begin, number, crc32(data.strip())))
    if not table:
        raise TaskError(f"{path}: holds no rows")
    header = _Header(
        size=status.st_size,
        changed_ns=status.st_mtime_ns,
        inode=status.st_ino,
        checksum=checksum.hexdigest(),
        rows=len(table) // _COLUMNS,
        columns=columns,
    )
    return header, table


def _records(kind: str, file: IO[bytes], read: Callable[[bytes], object]) -> Iterator[tuple[int, int, bytes]]:
    """Each record with its offset and line number; a quoted CSV field may go over several lines."""
    offset, number = 0, 0
    begin, first, held = 0, 1, b""
    for line in file:
        read(line)
        number += 1
        if not held:
            begin, first = offset, number
        offset += len(line)
        held += line
        if kind == "csv" and held.count(b'"') % 2:
            continue
        yield begin, first, held
        held = b""
    if held:
        yield begin, first, held


_DECODER = msgspec.json.Decoder(dict[str, Any])


def _parse(kind: str, data: bytes, path: Path, line: int, columns: list[str]) -> Row:
    if kind == "csv":
        values = _csv_fields(data, path, line)
        if len(values) != len(columns):
            raise TaskError(
                f"{path}, line {line}: {len(values)} fields; {len(columns)} are expected ({', '.join(columns)})"
            )
        return dict(zip(columns, values, strict=True))
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise TaskError(f"{path}, line {line}: is not a JSON object: {error}") from error


def _csv_columns(data: bytes, path: Path) -> list[str]:
    columns = _csv_fields(data.removeprefix(b"\xef\xbb\xbf"), path, 1)
    if len(set(columns)) != len(columns) or not all(columns):
        raise TaskError(f"{path}, line 1: names of columns must differ and not be empty, got {columns}")
    return columns


def _csv_fields(data: bytes, path: Path, line: int) -> list[str]:
    try:
        text = data.decode()
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}, line {line}: is not UTF-8 text") from error
    except csv.Error as error:
        raise TaskError(f"{path}, line {line}: is not CSV: {error}") from error
    return rows[0] if rows else []
