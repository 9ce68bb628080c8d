"""The program of the sandbox that compares an answer with the right one as mathematics, by the package math-verify.

Always true: no part of an answer is evaluated as code. math-verify reads LaTeX with a grammar (ANTLR) and plain
expressions with sympy's `parse_expr`, and sympy reads numbers with it too; it is Python's `eval`. That name is bound here
to the package's own reader of formulas, and sympy's evaluation is taken out of the process, so that a text which reached
it all the same would raise. A process compares one answer and ends.
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
"""What tells that a text has LaTeX in it."""


def prepare() -> None:
    """In the process that sandboxes are forked from: binds the readers, and imports what is imported late."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    parser.parse_expr = sympy_parser.parse_expr = _read_expression
    sympy_parser.eval_expr = _refuse_evaluation
    for right, answer in (("1/2", "$\\frac{1}{2}$"), ("x^2+1", "\\boxed{1+x^2}"), ("{1,2}", "$\\{2, 1\\}$")):
        compare(MathQuestion((right,), answer))


def reads() -> list[Path]:
    """Files that a sandbox must be able to read: modules are imported late."""
    return [Path(str(each.__file__)) for each in (os, sympy, math_verify)]


def serve(line: int, limits: SandboxLimits) -> None:
    """One question, one verdict."""
    with os.fdopen(line, "rb") as requests, os.fdopen(os.dup(line), "wb") as replies:
        body = read_frame(requests)
        if body is None:
            return
        question = msgspec.json.decode(
            msgspec.msgpack.decode(body, type=ExecuteRequest).code, type=MathQuestion
        )
        try:
            verdict = compare(question)
        except (MemoryError, RecursionError):  # more than an answer may take
            verdict = MathVerdict()
        write_frame(replies, ExecutionResult(msgspec.json.encode(verdict).decode()))


def compare(question: MathQuestion) -> MathVerdict:
    """Whether the answer is one of the right ones."""
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
    """A right answer; LaTeX is taken for such also without delimiters."""
    if any(each in text for each in _DELIMITERS) or "\\" not in text:
        return parser.parse(text, parsing_timeout=None)
    return parser.parse(f"${text}$", parsing_timeout=None)


def _read_expression(text: str, *_: Any, **__: Any) -> Any:
    return algebra(text)


def _refuse_evaluation(*_: Any, **__: Any) -> Any:
    raise ValueError("text is not evaluated here")
