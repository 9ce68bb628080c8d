"""Parser of arithmetic expressions: text to a tree of numbers, names, operators and calls.

Parsing computes no values and never uses Python's parser: text outside the caller's grammar (quotes, attributes, brackets,
digits of other scripts) raises `Unreadable` before any value is built. Length, nesting and the size of numbers are
bounded, so parsing takes time linear in the text.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 60
"""Nesting of parentheses, powers and signs; the deepest expected answers have about ten levels."""

MAX_DIGITS = 400
"""Digits of one number."""

MAX_TOKENS = 8_000
"""The longest expected answers, products of polynomials, have a few hundred."""

_TOKEN = re.compile(
    r"(?P<space>[ \t]+)|(?P<line>[\r\n]+)"
    r"|(?P<hex>0[xX][0-9a-fA-F]+)"
    r"|(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
    r"|(?P<name>[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*)"
    r"|(?P<sign>\*\*|<<|>>|[-+*/(),])",
    re.ASCII,
)

_PRECEDENCE = {"<<": 1, ">>": 1, "+": 2, "-": 2, "*": 3, "/": 3}
"""Precedence of left-associative operators, as in Python. `**` binds tighter and is right-associative."""

_TIGHTEST = 4


_CODE = re.compile(
    r"(?<!\w)[^\W\d]\w*[(\[{]|[^\W\d]\s*\.\s*[^\W\d]|__|[\[\]{}`@\\;\"]|\b(?:lambda|import|yield|await)\b|:=|=="
)
"""Signs of code: a call, an index, an attribute, a string, a statement."""


class Unreadable(ValueError):
    """A text that does not fit the grammar."""


def is_code(text: str) -> bool:
    """Whether an unreadable text looks like code, rather than prose, a wrong grid or a typo."""
    return _CODE.search(text) is not None


@dataclass(frozen=True)
class NumberNode:
    text: str


@dataclass(frozen=True)
class NameNode:
    text: str


@dataclass(frozen=True)
class NegativeNode:
    of: "ExpressionTree"


@dataclass(frozen=True)
class PositiveNode:
    of: "ExpressionTree"


@dataclass(frozen=True)
class PowerNode:
    base: "ExpressionTree"
    exponent: "ExpressionTree"


@dataclass(frozen=True)
class OperandsNode:
    """Operands of left-associative operators, flat, so that a long sum is not a deep tree."""

    first: "ExpressionTree"
    rest: tuple[tuple[str, "ExpressionTree"], ...]


@dataclass(frozen=True)
class FunctionNode:
    function: str
    arguments: tuple["ExpressionTree", ...]


ExpressionTree = NumberNode | NameNode | NegativeNode | PositiveNode | PowerNode | OperandsNode | FunctionNode


@dataclass(frozen=True)
class ExpressionGrammar:
    """Allowed elements of an expression, beside parentheses and signs."""

    operators: frozenset[str]
    """Subset of `<<`, `>>`, `+`, `-`, `*`, `/` and `**`."""
    has_decimals: bool = False
    """Whether numbers may have a decimal point or an exponent; otherwise they are integers."""
    has_hex: bool = False
    has_names: bool = False
    """Whether names and calls are allowed."""


def parse(text: str, grammar: ExpressionGrammar) -> ExpressionTree:
    """Parses a text; raises `Unreadable`."""
    parser = _Parser(_tokenize(text), grammar)
    tree = parser.expression(1, 0)
    if parser.at < len(parser.tokens):
        raise Unreadable(f"{parser.tokens[parser.at][1]!r} cannot stand there")
    return tree


def _tokenize(text: str) -> list[tuple[str, str]]:
    """Kind and text of each token. Line breaks are allowed only inside parentheses, as in Python."""
    text = text.strip(" \t\r\n\f")
    found: list[tuple[str, str]] = []
    at = open_parentheses = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"{text[at]!r} has no place in an expression")
        at = match.end()
        kind, token = match.lastgroup or "", match[0]
        open_parentheses += {"(": 1, ")": -1}.get(token, 0)
        if kind == "space" or (kind == "line" and open_parentheses > 0):
            continue
        if kind == "line":
            raise Unreadable("an expression is one line")
        found.append((kind, token))
    if len(found) > MAX_TOKENS:
        raise Unreadable(f"more than {MAX_TOKENS} numbers, names and signs")
    return found


@dataclass
class _Parser:
    """Precedence-climbing parser; each method advances `at` past the tokens it consumed."""

    tokens: list[tuple[str, str]]
    grammar: ExpressionGrammar
    at: int = field(default=0)

    def expression(self, lowest: int, depth: int) -> ExpressionTree:
        """Parses operators of precedence `lowest` and above."""
        if depth > MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} levels")
        if lowest == _TIGHTEST:
            return self._signed(depth)
        first = self.expression(lowest + 1, depth)
        rest = []
        while (sign := self._peek()) is not None and _PRECEDENCE.get(sign) == lowest:
            self._operator()
            rest.append((sign, self.expression(lowest + 1, depth)))
        return OperandsNode(first, tuple(rest)) if rest else first

    def _signed(self, depth: int) -> ExpressionTree:
        if depth > MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} levels")
        if self._peek() in ("+", "-"):
            sign = self._next()[1]
            of = self._signed(depth + 1)
            return NegativeNode(of) if sign == "-" else PositiveNode(of)
        base = self._atom(depth)
        if self._peek() == "**":
            self._operator()
            return PowerNode(base, self._signed(depth + 1))
        return base

    def _atom(self, depth: int) -> ExpressionTree:
        kind, token = self._next()
        if kind == "number" or (kind == "hex" and self.grammar.has_hex):
            return self._number(kind, token)
        if kind == "name" and self.grammar.has_names:
            return self._call(token, depth) if self._peek() == "(" else NameNode(token)
        if token == "(":
            inside = self.expression(1, depth + 1)
            self._expect(")")
            return inside
        raise Unreadable(f"{token!r} cannot stand there")

    def _number(self, kind: str, token: str) -> NumberNode:
        if len(token) > MAX_DIGITS:
            raise Unreadable(f"a number of more than {MAX_DIGITS} digits")
        if kind == "number" and not token.isdecimal() and not self.grammar.has_decimals:
            raise Unreadable(f"{token!r} is not a whole number")
        if token.isdecimal() and token.startswith("0") and token.strip("0"):
            raise Unreadable(f"{token!r} begins with a zero")
        return NumberNode(token)

    def _call(self, function: str, depth: int) -> ExpressionTree:
        self._expect("(")
        arguments = [self.expression(1, depth + 1)]
        while self._peek() == ",":
            self.at += 1
            arguments.append(self.expression(1, depth + 1))
        self._expect(")")
        return FunctionNode(function, tuple(arguments))

    def _operator(self) -> None:
        sign = self._next()[1]
        if sign not in self.grammar.operators:
            raise Unreadable(f"the operator {sign} is not one of {' '.join(sorted(self.grammar.operators))}")

    def _peek(self) -> str | None:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else None

    def _next(self) -> tuple[str, str]:
        if self.at >= len(self.tokens):
            raise Unreadable("it ends too soon")
        self.at += 1
        return self.tokens[self.at - 1]

    def _expect(self, token: str) -> None:
        if self._next()[1] != token:
            raise Unreadable(f"{token!r} is missing")


@dataclass(frozen=True)
class ExpressionBuilder:
    """Builds a value from a tree with the caller's functions for numbers, names and operators."""

    number: Callable[[str], Any]
    power: Callable[[Any, Any], Any]
    """Must bound the size of its result."""
    operators: Mapping[str, Callable[[Any, Any], Any]]
    name: Callable[[str], Any] | None = None
    call: Callable[[str, list[Any]], Any] | None = None

    def build(self, tree: ExpressionTree) -> Any:
        """Builds the value of a tree; operators are applied in Python's order."""
        match tree:
            case NumberNode(text):
                return self.number(text)
            case NameNode(text) if self.name is not None:
                return self.name(text)
            case NegativeNode(of):
                return -self.build(of)
            case PositiveNode(of):
                return +self.build(of)
            case PowerNode(base, exponent):
                return self.power(self.build(base), self.build(exponent))
            case OperandsNode(first, rest):
                value = self.build(first)
                for sign, operand in rest:
                    value = self.operators[sign](value, self.build(operand))
                return value
            case FunctionNode(function, arguments) if self.call is not None:
                return self.call(function, [self.build(each) for each in arguments])
            case _:
                raise Unreadable("names have no meaning here")
