"""Where tasks come from: a file, a dataset, a Python iterable or function; each gives rows by number.

A row is a plain mapping. The number of rows and a fingerprint of the content are known from the start, so that the same
draw gives the same row in every process and a resumed run can tell that its file was changed. A mistake in a file is one
line that names the file and the row.
"""

import importlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import msgspec

from rollwright.tasks.index import Row, TaskError, TextFile
from rollwright.tasks.order import is_held_out

_LARGEST_ITERABLE = 10_000_000
"""Rows of an iterable are held in memory; more than these are taken for one without an end."""


class TaskSource(Protocol):
    """Rows by number, and a fingerprint of them all."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row: ...

    def key(self, number: int) -> int:
        """A hash of the row's content, which decides whether it is held out."""
        ...

    @property
    def fingerprint(self) -> str: ...


class Subset:
    """Some rows of a source."""

    def __init__(self, source: TaskSource, numbers: Sequence[int]) -> None:
        self._source = source
        self._numbers = numbers
        self.fingerprint = f"{source.fingerprint}:{len(numbers)}"

    def __len__(self) -> int:
        return len(self._numbers)

    def key(self, number: int) -> int:
        return self._source.key(self._numbers[number])

    def row(self, number: int) -> Row:
        return self._source.row(self._numbers[number])


_Parts = tuple["array[int]", "array[int]"]

_SPLITS: dict[tuple[str, float], _Parts] = {}
"""The last splits of this process: a run opens its tasks several times while it is prepared, and a split looks at every row.
"""

_KEPT_SPLITS = 8


def split(source: TaskSource, share: float, name: str) -> tuple[TaskSource, TaskSource]:
    """The rows to train on, and those that are held out: a `share` of all, chosen by their content."""
    key = source.fingerprint, share
    parts = _SPLITS.get(key)
    if parts is None:
        parts = array("Q"), array("Q")
        for number in range(len(source)):
            parts[is_held_out(source.key(number), share)].append(number)
        while len(_SPLITS) >= _KEPT_SPLITS:
            del _SPLITS[next(iter(_SPLITS))]
        _SPLITS[key] = parts
    if not all(parts):
        raise TaskError(
            f"{name}: {len(source)} rows cannot be split with {share:g} held out; give a file of its own instead"
        )
    return Subset(source, parts[0]), Subset(source, parts[1])


class RowList:
    """Rows that are held in memory: those of an iterable, or of a function's result."""

    def __init__(self, rows: Iterable[Any], name: str) -> None:
        self._rows: list[Row] = []
        self._keys = array("Q")
        checksum = blake2b(digest_size=16)
        for number, row in enumerate(rows):
            if number == _LARGEST_ITERABLE:
                raise TaskError(f"{name}: gives more than {_LARGEST_ITERABLE:,} rows; write them to a file")
            if not isinstance(row, Mapping):
                raise TaskError(f"{name}, row {number}: is a {type(row).__name__}; a mapping is accepted")
            plain = dict(row)
            try:
                encoded = msgspec.json.encode(plain, order="deterministic")
            except (TypeError, ValueError) as error:
                raise TaskError(f"{name}, row {number}: holds what JSON cannot: {error}") from error
            checksum.update(encoded)
            self._keys.append(crc32(encoded))
            self._rows.append(plain)
        if not self._rows:
            raise TaskError(f"{name}: gives no rows")
        self.fingerprint = checksum.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, number: int) -> int:
        return self._keys[number]

    def row(self, number: int) -> Row:
        return self._rows[number]


class ParquetFile:
    """Rows of a Parquet file; one row group is held at a time."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise TaskError(f"{path}: needs pyarrow; install rollwright[export]") from error
        try:
            self._file = parquet.ParquetFile(path)
            self.fingerprint = _checksum(path)
        except (OSError, ValueError) as error:
            raise TaskError(f"{path}: cannot be read as Parquet: {error}") from error
        metadata = self._file.metadata
        self._path = path
        self._groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._length = int(metadata.num_rows)
        self._held: tuple[int, list[Row]] | None = None
        if not self._length:
            raise TaskError(f"{path}: holds no rows")

    def __len__(self) -> int:
        return self._length

    def key(self, number: int) -> int:
        return _key(self.row(number))

    def row(self, number: int) -> Row:
        group, place = 0, number
        while place >= self._groups[group]:
            place -= self._groups[group]
            group += 1
        if self._held is None or self._held[0] != group:
            self._held = (group, self._file.read_row_group(group).to_pylist())
        return self._held[1][place]


class Dataset:
    """A dataset of the `datasets` package, which maps its own files into memory."""

    def __init__(self, name: str, split: str | None) -> None:
        try:
            import datasets
        except ImportError as error:
            raise TaskError(f"{name}: needs the package `datasets`; install rollwright[datasets]") from error
        try:
            found = datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name)
        except Exception as error:  # a dozen kinds, most of them of other packages
            raise TaskError(f"{name}: cannot be loaded as a dataset: {_first_line(error)}") from error
        if isinstance(found, datasets.DatasetDict):
            if split is None and len(found) > 1:
                raise TaskError(f"{name}: has the splits {', '.join(found)}; name one behind a `#`")
            chosen = split or next(iter(found))
            if chosen not in found:
                raise TaskError(f"{name}#{chosen}: has no such split; there are {', '.join(found)}")
            found = found[chosen]
        self._dataset = found
        self.fingerprint = (
            str(found._fingerprint) if not Path(name).is_dir() else _folder_checksum(Path(name))
        )
        if not len(found):
            raise TaskError(f"{name}: holds no rows")

    def __len__(self) -> int:
        return len(self._dataset)

    def key(self, number: int) -> int:
        return _key(self.row(number))

    def row(self, number: int) -> Row:
        return dict(self._dataset[number])


def open_tasks(
    tasks: str | Iterable[Any] | Callable[[], Iterable[Any]], *, folder: Path, cache: Path
) -> TaskSource:
    """Opens what `tasks` names: `FILE.jsonl`, `.csv` or `.parquet`, a dataset's folder or `hf:NAME[#SPLIT]`, or
    `module:function`; or takes an iterable or function itself. Paths are relative to `folder`."""
    if not isinstance(tasks, str):
        made = tasks() if callable(tasks) else tasks
        return RowList(_iterable(made, "tasks"), "tasks")
    if tasks.startswith("hf:"):
        name, _, split = tasks.removeprefix("hf:").partition("#")
        return Dataset(name, split or None)
    path = folder / Path(tasks).expanduser()
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson", ".csv"):
        return TextFile(path, cache, "csv" if suffix == ".csv" else "jsonl")
    if suffix == ".parquet":
        return ParquetFile(path)
    bare, _, split = tasks.partition("#")
    if (folder / bare).is_dir():
        return Dataset(str(folder / bare), split or None)
    module, colon, name = tasks.partition(":")
    if colon and module and name and all(part.isidentifier() for part in module.split(".")):
        return RowList(_iterable(_imported(module, name, tasks), tasks), tasks)
    raise TaskError(
        f"tasks: `{tasks}` is no file that is known; accepted: a file ending in .jsonl, .csv or .parquet, the folder of "
        "a dataset, hf:NAME, or module:function"
    )


def _imported(module: str, name: str, shown: str) -> Any:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TaskError(f"tasks: `{shown}` cannot be imported: {_first_line(error)}") from error
    try:
        return found() if callable(found) else found
    except Exception as error:  # a user's own function may raise anything
        raise TaskError(f"tasks: `{shown}` raised {type(error).__name__}: {_first_line(error)}") from error


def _iterable(made: Any, shown: str) -> Iterable[Any]:
    if isinstance(made, Iterable) and not isinstance(made, str | bytes | Mapping):
        return made
    raise TaskError(f"{shown}: gives a {type(made).__name__}; an iterable of mappings is accepted")


def _key(row: Row) -> int:
    return crc32(msgspec.json.encode(row, order="deterministic", enc_hook=str))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _checksum(path: Path) -> str:
    checksum = blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum.update(chunk)
    return checksum.hexdigest()


def _folder_checksum(folder: Path) -> str:
    files: Sequence[Path] = sorted(each for each in folder.rglob("*") if each.is_file())
    together = blake2b(digest_size=16)
    for file in files:
        together.update(f"{file.relative_to(folder)}\0{_checksum(file)}\0".encode())
    return together.hexdigest()
