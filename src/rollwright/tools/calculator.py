"""A calculator: numbers, `+ - * / // % **`, brackets and a few functions. No text is evaluated as code.

Length and depth of an expression and the size of every intermediate number are bounded before they are computed, so
`9**9**9` is an error and not a hang.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rollwright.tools.tool import tool

_MAX_LENGTH = 1000
"""Longest expression, in characters."""
_MAX_DEPTH = 50
_MAX_BITS = 4096
"""Size of the largest integer; about 1,200 digits."""
_MAX_FACTORIAL = 400
"""Largest argument of `factorial`; its result is within `_MAX_BITS`."""

Number = int | float


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ValueError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    return value


def _factorial(number: Number) -> int:
    if number > _MAX_FACTORIAL:
        raise ValueError(f"factorial is limited to {_MAX_FACTORIAL}")
    if number != int(number):
        raise ValueError("factorial takes a whole number")
    return math.factorial(int(number))


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: _power,
    }
)
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = MappingProxyType(
    {ast.UAdd: operator.pos, ast.USub: operator.neg}
)
_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "abs": abs,
        "ceil": math.ceil,
        "cos": math.cos,
        "exp": math.exp,
        "factorial": _factorial,
        "floor": math.floor,
        "gcd": math.gcd,
        "ln": math.log,
        "log": math.log,
        "log10": math.log10,
        "log2": math.log2,
        "max": max,
        "min": min,
        "pow": _power,
        "round": round,
        "sin": math.sin,
        "sqrt": math.sqrt,
        "tan": math.tan,
    }
)
_CONSTANTS = MappingProxyType({"pi": math.pi, "e": math.e, "tau": math.tau})


def calculate(expression: str) -> Number:
    """Computes an expression, or raises a `ValueError` that explains the error."""
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_LENGTH} are taken")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        return _evaluate(tree.body, 0)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an expression: {expression!r}") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (OverflowError, TypeError) as error:
        raise ValueError(str(error)) from error


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth > _MAX_DEPTH:
        raise ValueError(f"brackets are nested deeper than {_MAX_DEPTH}")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: Any = value
        case ast.Name(id=name) if name in _CONSTANTS:
            result = _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            result = _UNARY[type(op)](_evaluate(operand, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_evaluate(left, depth + 1), _evaluate(right, depth + 1))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](*(_evaluate(each, depth + 1) for each in arguments))
        case _:
            known = ", ".join([*_FUNCTIONS, *_CONSTANTS])
            raise ValueError(f"{ast.unparse(node)!r} is not known; known are + - * / // % ** ( ) and {known}")
    if isinstance(result, int) and result.bit_length() > _MAX_BITS:
        raise ValueError("a number on the way is too large")
    return result  # type: ignore[no-any-return]


@tool
async def calculator(expression: str) -> str:
    """Computes an arithmetic expression, such as `2 * (3 + 4) ** 2` or `sqrt(2) / pi`.

    Args:
        expression: Numbers, + - * / // % **, brackets, functions such as sqrt, log, sin, and the constants pi and e.
    """
    return str(calculate(expression))
