"""Sandboxed program that compares an answer with the right ones by the package math-verify.

Always true: no part of an answer is evaluated as code. math-verify parses LaTeX with a grammar (ANTLR), but plain
expressions (and sympy numbers) with sympy's `parse_expr`, which calls Python's `eval`. Here that name is bound to this
package's own parser of formulas, and sympy's evaluation function is replaced by one that raises. A process compares one
answer and exits.
"""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import math_verify
import msgspec
import sympy
from math_verify import parser
from sympy.parsing import sympy_parser

from rollwright.envs.scoring.readers import algebra
from rollwright.rewards.math_messages import MathQuestion, MathVerdict
from rollwright.sandbox.protocol import (
    ExecuteRequest,
    ExecutionResult,
    SandboxLimits,
    read_frame,
    write_frame,
)

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
"""Delimiters of LaTeX in a text."""


def prepare() -> None:
    """Runs in the fork server: replaces the parsers, and triggers the lazy imports of the libraries."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    parser.parse_expr = sympy_parser.parse_expr = _read_expression
    sympy_parser.eval_expr = _refuse_evaluation
    for right, answer in (("1/2", "$\\frac{1}{2}$"), ("x^2+1", "\\boxed{1+x^2}"), ("{1,2}", "$\\{2, 1\\}$")):
        compare(MathQuestion((right,), answer))


def reads() -> list[Path]:
    """Files that a sandbox must be able to read, because modules are imported lazily."""
    return [Path(str(each.__file__)) for each in (os, sympy, math_verify)]


def serve(line: int, limits: SandboxLimits) -> None:
    """Answers one request."""
    with os.fdopen(line, "rb") as requests, os.fdopen(os.dup(line), "wb") as replies:
        body = read_frame(requests)
        if body is None:
            return
        question = msgspec.json.decode(
            msgspec.msgpack.decode(body, type=ExecuteRequest).code, type=MathQuestion
        )
        try:
            verdict = compare(question)
        except (MemoryError, RecursionError):  # the answer exceeds its limits
            verdict = MathVerdict()
        write_frame(replies, ExecutionResult(msgspec.json.encode(verdict).decode()))


def compare(question: MathQuestion) -> MathVerdict:
    """Compares the answer with each of the right ones."""
    rights = [(text, _read(text)) for text in question.right]
    for text, right in rights:
        if not right:
            return MathVerdict(problem=f"{text[:80]!r} cannot be read as mathematics")
    answer = parser.parse(question.answer, parsing_timeout=None)
    return MathVerdict(
        any(math_verify.verify(right, answer, timeout_seconds=None) for _, right in rights)
        if answer
        else False
    )


def _read(text: str) -> Any:
    """Parses a right answer; LaTeX commands are recognised without delimiters, too."""
    if any(each in text for each in _DELIMITERS) or "\\" not in text:
        return parser.parse(text, parsing_timeout=None)
    return parser.parse(f"${text}$", parsing_timeout=None)


def _read_expression(text: str, *_: Any, **__: Any) -> Any:
    return algebra(text)


def _refuse_evaluation(*_: Any, **__: Any) -> Any:
    raise ValueError("text is not evaluated here")
