"""Parser of lists, tuples, strings and numbers in Python notation, for answers that may be a Python list.

It accepts no names but `True`, `False` and `None`, no calls, operators, dictionaries or sets. Nesting and length are
bounded.
"""

import re
from dataclasses import dataclass
from typing import Any

from rollwright.envs.scoring.grammar import MAX_DIGITS, Unreadable

MAX_DEPTH = 8
"""Nesting of lists; matrices have two levels."""

_SPACE = re.compile(r"[ \t\r\n\f]*")
_TOKEN = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
    r"|(?P<string>'(?:[^'\\\n]|\\['\"\\nt])*'|\"(?:[^\"\\\n]|\\['\"\\nt])*\")"
    r"|(?P<word>True|False|None)(?![0-9A-Za-z_])"
    r"|(?P<sign>[\[\](),])",
    re.ASCII,
)
_WORDS = {"True": True, "False": False, "None": None}
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t"}
_CLOSING = {"[": "]", "(": ")"}


def read_literal(text: str) -> Any:
    """Parses a literal; raises `Unreadable`."""
    reader = _Reader(text)
    first = reader.value(0)
    if reader.peek() != ",":
        reader.end()
        return first
    items = [first]
    while reader.take(","):
        if reader.peek() is None:
            break
        items.append(reader.value(0))
    reader.end()
    return tuple(items)


@dataclass
class _Reader:
    text: str
    at: int = 0

    def value(self, depth: int) -> Any:
        self._skip_space()
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            raise Unreadable("not a list, tuple, string or number")
        self.at = match.end()
        token = match[0]
        match match.lastgroup:
            case "number":
                return _number(token)
            case "string":
                return _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), token[1:-1])
            case "word":
                return _WORDS[token]
            case _:
                return self._items(token, depth)

    def _items(self, opening: str, depth: int) -> Any:
        if opening not in _CLOSING or depth >= MAX_DEPTH:
            raise Unreadable(f"{opening!r} cannot stand there")
        items: list[Any] = []
        had_comma = False
        while self.peek() != _CLOSING[opening]:
            if items and not had_comma:
                raise Unreadable("a comma is missing")
            items.append(self.value(depth + 1))
            had_comma = self.take(",")
        self.take(_CLOSING[opening])
        if opening == "[":
            return items
        return items[0] if len(items) == 1 and not had_comma else tuple(items)

    def peek(self) -> str | None:
        self._skip_space()
        return self.text[self.at] if self.at < len(self.text) else None

    def take(self, sign: str) -> bool:
        if self.peek() != sign:
            return False
        self.at += 1
        return True

    def end(self) -> None:
        if self.peek() is not None:
            raise Unreadable(f"{self.text[self.at]!r} cannot stand there")

    def _skip_space(self) -> None:
        space = _SPACE.match(self.text, self.at)
        assert space is not None
        self.at = space.end()


def _number(token: str) -> int | float:
    if len(token) > MAX_DIGITS:
        raise Unreadable(f"a number of more than {MAX_DIGITS} digits")
    digits = token.lstrip("+-")
    if not digits.isdecimal():
        return float(token)
    if digits.startswith("0") and digits.strip("0"):
        raise Unreadable(f"{token!r} begins with a zero")
    return int(token)
