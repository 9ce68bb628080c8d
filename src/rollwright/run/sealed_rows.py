"""JSON objects that end with a checksum of themselves, alone in a file or one per line.

Invariants: an object that is returned is the object that was written. A single wrong byte, the newline included, is
corrected and counted; an uncorrectable line is skipped, with its line number. Objects without a checksum, as older releases
wrote them, are accepted if they are JSON and no line of the file has a checksum; resuming the run rewrites such a file.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from rollwright.errors import FormatError
from rollwright.run.log_records import corrected, crc32

_SEAL = b', "crc": "00000000"}'
_DIGITS = slice(10, 18)
"""Position in the seal of the checksum, which covers all bytes before the seal."""
_SEALED_END = re.compile(rb'"crc": "[0-9a-f]{8}"\}')

_LIKE_SEAL = re.compile(rb'": "[0-9a-f]{8}"\}$')
"""Ending that no line of an older release has."""

Row = dict[str, Any]

_SEALED_DIGITS = slice(_DIGITS.start - len(_SEAL), _DIGITS.stop - len(_SEAL))
"""Position of the checksum in a line."""

_BEFORE_DIGITS, _BEHIND_DIGITS = _SEAL[: _DIGITS.start], _SEAL[_DIGITS.stop :]


def seal(row: Mapping[str, Any], *, indent: int | None = None) -> str:
    body = json.dumps(row, indent=indent)[:-1].rstrip()
    return f'{body}, "crc": "{crc32(body.encode()):08x}"}}'


def unseal(data: bytes) -> tuple[Row, bool]:
    """The object, and whether it was corrected; raises a `ValueError` if it cannot be."""
    data = data.removesuffix(b"\n")
    body, end = data[: -len(_SEAL)], data[-len(_SEAL) :]
    if not _is_sealed(data):
        if _LIKE_SEAL.search(end):
            raise ValueError("ends with a damaged checksum")
        return _loaded(data), False
    digits, actual = end[_DIGITS], crc32(body)
    written = b"%08x" % actual
    if digits == written and _has_seal(data):
        return _loaded(body + b"}"), False
    if digits == written:
        return _loaded(body + b"}"), _unlike_seal(end) == 1
    if sum(one != other for one, other in zip(digits, written, strict=True)) == 1:
        return _loaded(body + b"}"), True
    mended = corrected(body, int(digits, 16)) if re.fullmatch(rb"[0-9a-f]{8}", digits) else None
    if mended is None:
        raise ValueError("does not have the checksum that it was written with")
    return _loaded(mended + b"}"), True


def _has_seal(data: bytes) -> bool:
    """Whether it ends with a seal without any damage, its checksum aside; as fast as nearly every line deserves."""
    return data.endswith(_BEHIND_DIGITS) and data[-len(_SEAL) : _DIGITS.start - len(_SEAL)] == _BEFORE_DIGITS


def _is_sealed(data: bytes) -> bool:
    return len(data) > len(_SEAL) and (_has_seal(data) or _unlike_seal(data[-len(_SEAL) :]) <= 1)


def _unlike_seal(end: bytes) -> int:
    """Bytes that differ from a seal, its checksum aside."""
    if len(end) < len(_SEAL):
        return len(_SEAL)
    start, stop = _DIGITS.start, _DIGITS.stop
    return sum(
        one != other
        for place, (one, other) in enumerate(zip(end, _SEAL, strict=True))
        if not start <= place < stop
    )


def _loaded(data: bytes) -> Row:
    try:
        content = msgspec.json.decode(data)
    except msgspec.DecodeError:  # of what Python writes, msgspec refuses NaN, infinities and lone surrogates
        content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    if "crc" in content:  # a sealed object with bytes behind its seal
        raise ValueError("has something behind its checksum")
    return content


def read_sealed(file: Path) -> tuple[Row, bool]:
    """Read a file that is one object, see `unseal`; raises a `FormatError` that names the file."""
    content = file.read_bytes()
    if (row := _last(content)) is not None and not content.endswith(b"}\n"):
        return row, True  # only its final newline is damaged
    try:
        return unseal(content)
    except ValueError as error:
        raise FormatError(f"{file}: is damaged: {error}") from error


@dataclass
class SealedRows:
    """Rows of a file, and its damage."""

    file: Path
    rows: list[Row] = field(default_factory=list)
    mended: list[int] = field(default_factory=list)
    """Numbers of the corrected lines, from 1."""
    damaged: list[tuple[int, bytes]] = field(default_factory=list)
    """Numbers and bytes of the unreadable lines."""
    unsealed: bool = False
    """Whether the lines have no checksums."""
    cut_off: bool = False
    """Whether it ends with a partial line, as after a crash."""

    def told(self) -> Iterator[str]:
        """One line for each kind of damage."""
        if self.damaged:
            yield f"{self.file}: line {_list(number for number, _ in self.damaged)} cannot be read and is left out"
        if self.cut_off:
            yield f"{self.file}: ends with half a line, which is left out"
        if self.mended:
            yield f"{self.file}: line {_list(self.mended)} had a wrong byte, put right by the checksum"


def read_rows(file: Path) -> SealedRows:
    try:
        return parse_rows(file, file.read_bytes())
    except FileNotFoundError:
        return SealedRows(file)


def check_rows(file: Path) -> SealedRows:
    """The damage of a file, and its rows if it has any. A file whose every checksum is right is not decoded: it may be long."""
    found = SealedRows(file)
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return found
    is_whole = not content or (content.endswith(b"\n") and all(map(_is_intact, _lines(content))))
    return found if is_whole else parse_rows(file, content)


def _is_intact(line: bytes) -> bool:
    """Whether a line, without its newline, has a seal with the right checksum."""
    return _has_seal(line) and line[_SEALED_DIGITS] == b"%08x" % crc32(line[: -len(_SEAL)])


def parse_rows(file: Path, content: bytes) -> SealedRows:
    """The rows of a file's content, or of its end."""
    found = SealedRows(file)
    found.rows = list(_parsed(found, content))
    return found


def iterate_rows(found: SealedRows) -> Iterator[Row]:
    """Yields the rows of the file one by one, and notes its damage in `found`; complete when the last row was yielded."""
    try:
        content = found.file.read_bytes()
    except FileNotFoundError:
        return
    yield from _parsed(found, content)


def _parsed(found: SealedRows, content: bytes) -> Iterator[Row]:
    whole, newline, tail = content.rpartition(b"\n")
    waiting: list[tuple[int, bytes]] = []
    found.unsealed = bool(whole.strip()) and not any(map(_is_sealed, _lines(whole)))
    number = 0
    for number, line in enumerate(_lines(whole), 1):
        if not line or line.isspace():
            continue
        try:
            if _is_intact(line):
                row, mended = _loaded(line[: -len(_SEAL)] + b"}"), False
            elif not found.unsealed and not _is_sealed(line):
                raise ValueError("has no checksum, unlike others")
            else:
                row, mended = unseal(line)
        except ValueError:
            waiting.append((number, line))
            continue
        if waiting:
            yield from _mend(found, waiting)
        yield row
        if mended:
            found.mended.append(number)
    if tail.strip():
        number = whole.count(b"\n") + 2 if newline else 1
        last = _last(tail)
        found.cut_off = last is None
        if last is not None:
            yield from _mend(found, waiting)
            yield last
            found.mended.append(number)
    yield from _mend(found, waiting)


def _lines(text: bytes) -> Iterator[bytes]:
    return (line.removesuffix(b"\n") for line in BytesIO(text))


def _last(tail: bytes) -> Row | None:
    """The row of a line whose newline alone is damaged or missing."""
    for candidate in (tail, tail[:-1]):
        if _SEALED_END.search(candidate[-len(_SEAL) :]):
            try:
                return unseal(candidate)[0]
            except ValueError:
                continue
    return None


def _mend(found: SealedRows, lines: list[tuple[int, bytes]]) -> list[Row]:
    """Try to read consecutive unreadable lines together: damage may have removed a newline between them, or added one."""
    if not lines:
        return []
    numbers = [number for number, _ in lines]
    together = b"\n".join(line for _, line in lines)
    rows = _split(together) or _split(together, join=True)
    if rows:
        found.mended += numbers
    else:
        found.damaged += lines
    lines.clear()
    return rows


def _split(text: bytes, *, join: bool = False) -> list[Row]:
    """Objects of the text, split at each checksum, or the whole text as one with `join`; empty if one is unreadable."""
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
    """The first numbers, and the count of the rest."""
    every = list(numbers)
    more = f" and {len(every) - 5} more" if len(every) > 5 else ""
    return ", ".join(map(str, every[:5])) + more
