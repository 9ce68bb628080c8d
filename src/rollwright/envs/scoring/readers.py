"""Parsers that replace `eval` and sympy's `parse_expr` (which calls `eval`) in reasoning-gym's scorers.

Nine scorers evaluate the answer, and two more the dataset's own text. They run unchanged, but the names of their evaluation
functions are bound to the parsers in this module. `bind` patches reasoning-gym's modules, only in the judge's process. An
unlisted scorer that evaluates is stopped by `rollwright.envs.scoring.guard`.
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
"""Grammar of countdown and puzzle24: four operators and integers. A number in another form (`0x18`, `2.4e1`, `pi`) would
also evade the check of the numbers used."""
ALGEBRA = ExpressionGrammar(_FOUR | {"**"}, has_decimals=True, has_names=True)
SHIFTING = ExpressionGrammar(frozenset({"+", "-", "*", "<<", ">>"}), has_hex=True)
"""Grammar of the questions of bitwise_arithmetic."""

MAX_BITS = 20_000
"""Size of the largest number that a power may produce."""
MAX_EXPONENT = 1_000
"""Largest exponent of any base: sympy expands powers of sums."""

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
    """State of the answer being scored. An unreadable answer is refused only if it looks like code; otherwise its scorer
    treats it like any text that it cannot parse."""

    answer: str = ""
    refused: str | None = None
    takes_integrals: bool = False
    """Whether the dataset's own answer contains an unsolved integral. Otherwise an integral only repeats the question, and
    would pass, because scorers compare derivatives."""

    def begin(self, answer: str, own_answer: object) -> None:
        """Starts the scoring of an answer."""
        self.answer, self.refused = answer.strip(), None
        self.takes_integrals = "Integral(" in str(own_answer)

    def refuse(self, text: str, error: Unreadable) -> None:
        """Records that an unreadable answer is refused, if it looks like code."""
        if text.strip() == self.answer and is_code(text):  # another text is the dataset's own
            self.refused = str(error)


READING = Reading()
"""State of this process, which scores one answer at a time."""


def literal(text: str) -> Any:
    """Replaces `eval` where an answer may be a Python list."""
    try:
        return read_literal(text)
    except Unreadable as error:
        READING.refuse(text, error)
        raise


def counted(text: str) -> Any:
    """Replaces `parse_expr` where an answer is a calculation with given numbers."""
    return _read(text, COUNTING, _Algebra({}).builder())


def algebra(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """Replaces `parse_expr` where an answer is a formula."""
    return _read(text, ALGEBRA, _Algebra(local_dict or {}).builder())


def truth(text: str) -> bool | None:
    """Replaces `bool`, for which every non-empty text is true. `None`: neither true nor false."""
    return {"true": True, "false": False}.get(str(text).strip().lower())


def shifted(text: str) -> Any:
    """Replaces `eval` for questions about integers and shifts."""
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
    """Builds sympy objects from trees with the operations that `parse_expr` would use."""

    known: Mapping[str, Any]
    """Names that the scorer defines itself."""

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
    """A power, bounded before it is computed: `9**9**9` has 370 million digits."""
    if exponent.is_number and not exponent.is_Symbol:
        if exponent.is_Rational:
            size = max(abs(exponent.p) / exponent.q, exponent.q)
            if size > MAX_EXPONENT or _bits(base) * size > MAX_BITS:
                raise Unreadable("a power too large to be part of an answer")
        elif exponent.is_Float and abs(exponent) > MAX_EXPONENT:
            raise Unreadable("a power too large to be part of an answer")
    return base**exponent


def _bits(base: Any) -> int:
    """Bit length of the largest integer in an expression."""
    return max(
        (max(each.p.bit_length(), each.q.bit_length()) for each in base.atoms(sympy.Rational)), default=1
    )


class _SympyProxy:
    """Proxy of the module `sympy` with another `parse_expr`."""

    parse_expr = staticmethod(algebra)

    def __getattr__(self, name: str) -> Any:
        return getattr(sympy, name)


_SYMPY = _SympyProxy()

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
"""Datasets whose scorer evaluates text: its module, the name that it calls, and the replacement."""

CORRECTIONS: dict[str, tuple[str, str, object]] = {
    "game_of_life_halting": ("algorithmic.game_of_life_halting", "bool", truth),
}
"""Datasets whose scorer gives the full score to any text: its module, the name that it calls, and the replacement."""

ALGEBRAIC = frozenset({name for name, (_, _, reader) in BINDINGS.items() if reader not in (literal, shifted)})
"""Datasets whose answers become sympy objects, which sympy caches."""


def bind() -> None:
    """Patches reasoning-gym and sympy in this process, permanently."""
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
"""Replacements for functions that sympy generates as code, for speed, and executes. These compute the same."""
