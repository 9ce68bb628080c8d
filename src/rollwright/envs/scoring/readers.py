"""What reasoning-gym's scorers call instead of `eval` and sympy's `parse_expr`, which is `eval` too.

Nine scorers evaluate the answer, and two more the dataset's own text. They run unchanged, but the names by which they
would evaluate are bound to the readers here, so what they get is a value that was read as data. `bind` puts them into
reasoning-gym's modules, in the process that judges and nowhere else. A scorer that is not listed and evaluates all the
same is stopped by `rollwright.envs.scoring.guard`.
"""

import builtins
import importlib
import keyword
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.polys import monomials

from rollwright.envs.scoring.grammar import (
    ExpressionBuilder,
    ExpressionGrammar,
    Unreadable,
    is_code,
    parse,
)
from rollwright.envs.scoring.literals import read_literal

_FOUR = frozenset({"+", "-", "*", "/"})
COUNTING = ExpressionGrammar(_FOUR)
"""countdown and puzzle24 ask for the four operators and whole numbers. A number in any other form (`0x18`, `2.4e1`, `pi`)
would also hide from the count of the numbers used."""
ALGEBRA = ExpressionGrammar(_FOUR | {"**"}, has_decimals=True, has_names=True)
SHIFTING = ExpressionGrammar(frozenset({"+", "-", "*", "<<", ">>"}), has_hex=True)
"""The questions of bitwise_arithmetic."""

MAX_BITS = 20_000
"""Of a number that a power gives."""
MAX_EXPONENT = 1_000
"""Of anything: sympy multiplies powers of sums out."""

_CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(sympy, name)
        for name in (
            *("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "sech", "csch"),
            *("asin", "acos", "atan", "acot", "asec", "acsc", "asinh", "acosh", "atanh", "acoth"),
            *("exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign", "erf", "erfi", "Ei", "Si", "Ci", "li"),
            *("fresnels", "fresnelc"),
        )
    },
    "abs": sympy.Abs,
}
_TWO_ARGUMENTS: dict[str, Callable[[Any, Any], Any]] = {"log": sympy.log, "Integral": sympy.Integral}
_OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "<<": operator.lshift,
    ">>": operator.rshift,
}


@dataclass
class Reading:
    """The answer that is being judged, and why it was refused. An answer that cannot be read and is no attempt at code is
    not refused: its scorer gives it what it gives to any text that it cannot parse."""

    answer: str = ""
    refused: str | None = None
    takes_integrals: bool = False
    """Whether the dataset's own answer leaves an integral unsolved. Elsewhere an integral only says the question again, and
    its derivative is what was asked for."""

    def begin(self, answer: str, own_answer: object) -> None:
        self.answer, self.refused = answer.strip(), None
        self.takes_integrals = "Integral(" in str(own_answer)

    def refuse(self, text: str, error: Unreadable) -> None:
        if text.strip() == self.answer and is_code(text):  # otherwise it is the dataset's own text
            self.refused = str(error)


READING = Reading()
"""Of this process, which judges one answer at a time."""


def literal(text: str) -> Any:
    """In place of `eval`, where a scorer also takes a Python list."""
    try:
        return read_literal(text)
    except Unreadable as error:
        READING.refuse(text, error)
        raise


def counted(text: str) -> Any:
    """In place of `parse_expr`, where an answer is a calculation with given numbers."""
    return _read(text, COUNTING, _Algebra({}).builder())


def algebra(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """In place of `parse_expr`, where an answer is a formula."""
    return _read(text, ALGEBRA, _Algebra(local_dict or {}).builder())


def truth(text: str) -> bool | None:
    """In place of `bool`, to which every text is true. `None`: neither of the two."""
    return {"true": True, "false": False}.get(str(text).strip().lower())


def shifted(text: str) -> Any:
    """In place of `eval`, for questions about whole numbers and shifts."""
    return _read(
        text, SHIFTING, ExpressionBuilder(lambda number: int(number, 0), _no_power, operators=_OPERATORS)
    )


def _read(text: str, grammar: ExpressionGrammar, builder: ExpressionBuilder) -> Any:
    try:
        return builder.build(parse(text, grammar))
    except Unreadable as error:
        READING.refuse(text, error)
        raise


def _no_power(base: Any, exponent: Any) -> Any:
    raise Unreadable("no powers here")


@dataclass(frozen=True)
class _Algebra:
    """Trees as sympy's objects, by the operations that `parse_expr` would call."""

    known: Mapping[str, Any]
    """Names that the scorer gives a meaning of its own."""

    def builder(self) -> ExpressionBuilder:
        return ExpressionBuilder(_number, _power, _OPERATORS, self._name, self._call)

    def _name(self, name: str) -> Any:
        if name in self.known:
            return self.known[name]
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if hasattr(sympy, name) or hasattr(builtins, name) or keyword.iskeyword(name):
            raise Unreadable(f"{name} is not a variable")
        return sympy.Symbol(name)

    def _call(self, name: str, arguments: list[Any]) -> Any:
        if len(arguments) == 1 and name in _FUNCTIONS:
            return _FUNCTIONS[name](arguments[0])
        if len(arguments) == 2 and name in _TWO_ARGUMENTS:
            if name == "Integral" and not (READING.takes_integrals and arguments[1].is_Symbol):
                raise Unreadable("an integral that is not solved is no answer")
            return _TWO_ARGUMENTS[name](*arguments)
        raise Unreadable(f"{name} is not a known function of {len(arguments)}")


def _number(text: str) -> Any:
    return sympy.Integer(int(text)) if text.isdecimal() else sympy.Float(text)


def _power(base: Any, exponent: Any) -> Any:
    """Bounded before it is computed: `9**9**9` has 370 million digits."""
    if exponent.is_number and not exponent.is_Symbol:
        if exponent.is_Rational:
            size = max(abs(exponent.p) / exponent.q, exponent.q)
            if size > MAX_EXPONENT or _bits(base) * size > MAX_BITS:
                raise Unreadable("a power too large to be part of an answer")
        elif exponent.is_Float and abs(exponent) > MAX_EXPONENT:
            raise Unreadable("a power too large to be part of an answer")
    return base**exponent


def _bits(base: Any) -> int:
    """Of the whole numbers in it."""
    return max(
        (max(each.p.bit_length(), each.q.bit_length()) for each in base.atoms(sympy.Rational)), default=1
    )


class _ReadingSympy:
    """The module `sympy`, but for `parse_expr`."""

    parse_expr = staticmethod(algebra)

    def __getattr__(self, name: str) -> Any:
        return getattr(sympy, name)


_SYMPY = _ReadingSympy()

BINDINGS: dict[str, tuple[str, str, object]] = {
    "binary_matrix": ("algorithmic.binary_matrix", "eval", literal),
    "n_queens": ("games.n_queens", "eval", literal),
    "number_sorting": ("algorithmic.number_sorting", "eval", literal),
    "spiral_matrix": ("algorithmic.spiral_matrix", "eval", literal),
    "string_insertion": ("algorithmic.string_insertion", "eval", literal),
    "bitwise_arithmetic": ("arithmetic.bitwise_arithmetic", "eval", shifted),
    "countdown": ("games.countdown", "parse_expr", counted),
    "puzzle24": ("games.puzzle24", "parse_expr", counted),
    "polynomial_multiplication": ("algebra.polynomial_multiplication", "sp", _SYMPY),
    "simple_integration": ("algebra.simple_integration", "sympy", _SYMPY),
    "intermediate_integration": ("algebra.intermediate_integration", "sympy", _SYMPY),
}
"""Datasets whose scorer evaluates: its module, the name by which it does, and what stands there instead."""

CORRECTIONS: dict[str, tuple[str, str, object]] = {
    "game_of_life_halting": ("algorithmic.game_of_life_halting", "bool", truth),
}
"""Datasets whose own scorer gives full marks to any text: its module, a name it uses, and what stands there instead."""

ALGEBRAIC = frozenset({name for name, (_, _, reader) in BINDINGS.items() if reader not in (literal, shifted)})
"""Those whose answers become sympy's objects, which sympy keeps in caches."""


def bind() -> None:
    """In this process, for good."""
    for module, name, reader in (*BINDINGS.values(), *CORRECTIONS.values()):
        setattr(importlib.import_module(f"reasoning_gym.{module}"), name, reader)
    for name, function in _MONOMIALS.items():
        setattr(monomials.MonomialOps, name, lambda self, function=function: function)


def _monomial_mulpow(a: tuple[int, ...], b: tuple[int, ...], k: int) -> tuple[int, ...]:
    return tuple(each + other * k for each, other in zip(a, b, strict=True))


_MONOMIALS = {
    "mul": monomials.monomial_mul,
    "pow": monomials.monomial_pow,
    "mulpow": _monomial_mulpow,
    "ldiv": monomials.monomial_ldiv,
    "div": monomials.monomial_div,
    "lcm": monomials.monomial_lcm,
    "gcd": monomials.monomial_gcd,
}
"""sympy writes code for products of many variables, to be fast, and executes it. These do the same without."""
