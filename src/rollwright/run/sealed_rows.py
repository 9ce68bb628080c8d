"""JSON objects that end with a checksum of themselves, alone in a file or one to a line.

Always true: an object that is given out is as it was written. One wrong byte anywhere in it, the end of its line
included, is put right, and counted; what cannot be put right is left out, with its line's number. Objects without a
checksum, which older releases wrote, are taken if they are JSON, and if no line of the file has one: whoever goes on with
such a file writes it anew.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollwright.errors import FormatError
from rollwright.run.log_records import corrected, crc32

_SEAL = b', "crc": "00000000"}'
_DIGITS = slice(10, 18)
"""Where in the seal the checksum stands, of all that is before it."""
_SEALED_END = re.compile(rb'"crc": "[0-9a-f]{8}"\}')

_LIKE_SEAL = re.compile(rb'": "[0-9a-f]{8}"\}$')
"""As no line of an older release ends."""

Row = dict[str, Any]


def seal(row: Mapping[str, Any], *, indent: int | None = None) -> str:
    body = json.dumps(row, indent=indent)[:-1].rstrip()
    return f'{body}, "crc": "{crc32(body.encode()):08x}"}}'


def unseal(data: bytes) -> tuple[Row, bool]:
    """The object, and whether it had to be put right. A `ValueError` where it cannot be."""
    data = data.removesuffix(b"\n")
    body, end = data[: -len(_SEAL)], data[-len(_SEAL) :]
    if not _is_sealed(data):
        if _LIKE_SEAL.search(end):
            raise ValueError("ends with a damaged checksum")
        return _loaded(data), False
    digits, actual = end[_DIGITS], crc32(body)
    written = b"%08x" % actual
    if digits == written:
        return _loaded(body + b"}"), _unlike_seal(end) == 1
    if sum(one != other for one, other in zip(digits, written, strict=True)) == 1:
        return _loaded(body + b"}"), True
    mended = corrected(body, int(digits, 16)) if re.fullmatch(rb"[0-9a-f]{8}", digits) else None
    if mended is None:
        raise ValueError("does not have the checksum that it was written with")
    return _loaded(mended + b"}"), True


def _is_sealed(data: bytes) -> bool:
    return len(data) > len(_SEAL) and _unlike_seal(data[-len(_SEAL) :]) <= 1


def _unlike_seal(end: bytes) -> int:
    """Bytes that are not as in a seal, the checksum left aside."""
    if len(end) < len(_SEAL):
        return len(_SEAL)
    start, stop = _DIGITS.start, _DIGITS.stop
    return sum(
        one != other
        for place, (one, other) in enumerate(zip(end, _SEAL, strict=True))
        if not start <= place < stop
    )


def _loaded(data: bytes) -> Row:
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    if "crc" in content:  # it was sealed, and does not end with the seal
        raise ValueError("has something behind its checksum")
    return content


def read_sealed(file: Path) -> tuple[Row, bool]:
    """A file that is one object, see `unseal`; a `FormatError` that names it where it cannot be read."""
    content = file.read_bytes()
    if (row := _last(content)) is not None and not content.endswith(b"}\n"):
        return row, True  # its last end of line is what is damaged
    try:
        return unseal(content)
    except ValueError as error:
        raise FormatError(f"{file}: is damaged: {error}") from error


@dataclass
class Rows:
    """The lines of a file."""

    file: Path
    rows: list[Row] = field(default_factory=list)
    mended: list[int] = field(default_factory=list)
    """Numbers of lines that were put right, from 1."""
    damaged: list[tuple[int, bytes]] = field(default_factory=list)
    """Lines that cannot be read."""
    unsealed: bool = False
    """Whether the lines have no checksums."""
    cut_off: bool = False
    """Whether it ends with half a line, as a crash leaves it."""

    def told(self) -> Iterator[str]:
        """What is wrong with the file, in a line for each kind."""
        if self.damaged:
            yield f"{self.file}: line {_list(number for number, _ in self.damaged)} cannot be read and is left out"
        if self.cut_off:
            yield f"{self.file}: ends with half a line, which is left out"
        if self.mended:
            yield f"{self.file}: line {_list(self.mended)} had a wrong byte, put right by the checksum"


def read_rows(file: Path) -> Rows:
    found = Rows(file)
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return found
    whole, newline, tail = content.rpartition(b"\n")
    waiting: list[tuple[int, bytes]] = []
    lines = whole.split(b"\n") if newline else []
    found.unsealed = bool(whole.strip()) and not any(map(_is_sealed, lines))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if not found.unsealed and not _is_sealed(line):
                raise ValueError("has no checksum, unlike others")
            row, mended = unseal(line)
        except ValueError:
            waiting.append((number, line))
            continue
        _mend(found, waiting)
        found.rows.append(row)
        found.mended += [number] * mended
    if tail.strip():
        number = len(lines) + 1
        last = _last(tail)
        found.cut_off = last is None
        if last is not None:
            _mend(found, waiting)
            found.rows.append(last)
            found.mended.append(number)
    _mend(found, waiting)
    return found


def _last(tail: bytes) -> Row | None:
    """A whole line that lacks its end alone."""
    for candidate in (tail, tail[:-1]):
        if _SEALED_END.search(candidate[-len(_SEAL) :]):
            try:
                return unseal(candidate)[0]
            except ValueError:
                continue
    return None


def _mend(found: Rows, lines: list[tuple[int, bytes]]) -> None:
    """Lines in a row that cannot be read by themselves: an end of line may be what is damaged, or came of damage."""
    if not lines:
        return
    numbers = [number for number, _ in lines]
    together = b"\n".join(line for _, line in lines)
    rows = _split(together) or _split(together, join=True)
    if rows:
        found.rows += rows
        found.mended += numbers
    else:
        found.damaged += lines
    lines.clear()


def _split(text: bytes, *, join: bool = False) -> list[Row]:
    """The objects in it, each up to its checksum, or all of it as one; empty where that does not come out."""
    ends = [len(text)] if join else [match.end() for match in _SEALED_END.finditer(text)]
    rows: list[Row] = []
    start = 0
    for end in ends:
        if not _is_sealed(text[start:end]):
            return []
        try:
            rows.append(unseal(text[start:end])[0])
        except ValueError:
            return []
        start = end + 1
    return rows if start >= len(text) else []


def _list(numbers: Any) -> str:
    """Some of them by number, and how many more."""
    every = list(numbers)
    more = f" and {len(every) - 5} more" if len(every) > 5 else ""
    return ", ".join(map(str, every[:5])) + more
