"""Unit tests of an answer's code, run in the Python sandbox.

Always true: each test runs in a new sandbox, so tests share no state. Code that raises, hangs, exits or kills its sandbox
fails that test; a sandbox that cannot start is a failure of the reward, never a 0. Expected outputs and values never enter
the sandbox: output and return value are compared outside, as data, so that code cannot write its own score. Tests that are
Python text run in the sandbox together with the code.
"""

import asyncio
import math
import re
import secrets
from typing import Any

import msgspec

from rollwright.rewards.failure import NoReward
from rollwright.rewards.functions import Value
from rollwright.rewards.scored import ScoredAttempt
from rollwright.rewards.settings import UnitTestsReward
from rollwright.sandbox.client import AHEAD, SandboxError, SandboxFactory
from rollwright.sandbox.protocol import ExecutionResult, SandboxLimits

_FENCED = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)```", re.DOTALL)
_PYTHON = frozenset({"", "python", "python3", "py"})

_OUTPUT = 1 << 16
"""Limit of characters of a test's output."""

_FORMS = '{"input": …, "output": …}, {"call": …, "returns": …} or Python text'


class OutputTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Standard input and expected output; white space at the ends of lines is ignored."""

    output: str
    input: str = ""


class CallTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An expression that calls the code, and its expected value as JSON."""

    call: str
    returns: Any


UnitTest = OutputTest | CallTest | str


class UnitTests:
    """See `UnitTestsReward`."""

    def __init__(self, name: str, settings: UnitTestsReward) -> None:
        self._settings = settings
        limits = SandboxLimits(
            seconds=settings.seconds,
            cpu_seconds=max(1, round(2 * settings.seconds)),
            memory=settings.memory_mb << 20,
            output=_OUTPUT,
        )
        self._sandboxes = SandboxFactory(limits, allow_unconfined=settings.allow_unconfined, ahead=AHEAD)
        self._places = asyncio.Semaphore(settings.concurrency)

    async def evaluate(self, attempt: ScoredAttempt) -> Value:
        tests = read_tests(attempt.task_field(self._settings.field), self._settings)
        code = extract_code(attempt.answer)
        if not self._settings.partial:
            for each in tests:  # sequential: the first failing test decides
                if not await self._passes(code, each):
                    return 0.0
            return 1.0
        passed = await asyncio.gather(*(self._passes(code, each) for each in tests))
        return sum(passed) / len(tests)

    async def close(self) -> None:
        self._sandboxes.close()

    async def _passes(self, code: str, test: UnitTest) -> bool:
        mark = secrets.token_hex(16)
        program, check = _programs(code, test, mark)
        async with self._places:
            ran = await self._run_twice(program, check)
        return not ran.error and not ran.has_ended and _is_right(ran, test, mark)

    async def _run_twice(self, program: str, check: str) -> ExecutionResult:
        """Repeats a test whose sandbox died. Either the code killed it, which it will do again, or the fork server died."""
        try:
            ran = await self._run(program, check)
            if not ran.has_ended or ran.is_late:
                return ran
        except SandboxError:
            pass
        try:
            return await self._run(program, check)
        except SandboxError as error:
            raise NoReward(str(error)) from error

    async def _run(self, program: str, check: str) -> ExecutionResult:
        sandbox = await self._sandboxes.open()
        try:
            ran = await sandbox.run(program)
            if check and not ran.error and not ran.has_ended:
                ran = await sandbox.run(check)
            return ran
        finally:
            sandbox.close()


def extract_code(answer: str) -> str:
    """The last Python code block of the answer; the whole answer if there is none."""
    blocks = [code for language, code in _FENCED.findall(answer) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else answer


def read_tests(value: Any, settings: UnitTestsReward) -> list[UnitTest]:
    """Parses the tests of a task; raises `NoReward` for invalid ones."""
    many = value if isinstance(value, list | tuple) else [value]
    where = f"the task's {settings.field!r}"
    if not many:
        raise NoReward(f"{where} has no tests")
    if len(many) > settings.max_tests:
        raise NoReward(f"{where} has {len(many)} tests; max_tests is {settings.max_tests}")
    return [_read_test(each, where) for each in many]


def _read_test(value: Any, where: str) -> UnitTest:
    if isinstance(value, str):
        return value
    try:
        if isinstance(value, dict) and "call" in value:
            return msgspec.convert(value, CallTest)
        return msgspec.convert(value, OutputTest)
    except msgspec.ValidationError as error:
        raise NoReward(f"{where}: a test is not of the form {_FORMS}: {error}") from error


def _programs(code: str, test: UnitTest, mark: str) -> tuple[str, str]:
    """The program to run, and the check after it. The final `pass` prevents that a last expression is printed."""
    match test:
        case OutputTest():
            given = f"import io as _io, sys as _sys\n_sys.stdin = _io.StringIO({test.input!r})\n"
            return f"{given}exec(compile({code!r}, 'answer.py', 'exec'), globals())\npass", ""
        case CallTest():
            shown = f"import json as _json\nprint('\\n{mark}' + _json.dumps({test.call}, default=repr))\npass"
            return f"{code}\npass", shown
        case _:
            return f"{code}\npass", f"{test}\nprint('\\n{mark}')\npass"


def _is_right(ran: ExecutionResult, test: UnitTest, mark: str) -> bool:
    if isinstance(test, OutputTest):
        return _plain(ran.output) == _plain(test.output)
    _, found, behind = ran.output.rpartition(f"\n{mark}")
    if not found or isinstance(test, str):
        return bool(found)
    try:
        return bool(_same(msgspec.json.decode(behind), test.returns))
    except (msgspec.MsgspecError, RecursionError):
        return False


def _plain(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _same(value: Any, wanted: Any) -> bool:
    """Equal as JSON: true is not 1, and decimal numbers may differ by rounding."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, list) and isinstance(wanted, list | tuple):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(_same(value[key], wanted[key]) for key in value)
    if isinstance(value, float) or isinstance(wanted, float):
        return (
            isinstance(value, int | float) and isinstance(wanted, int | float) and math.isclose(value, wanted)
        )
    return bool(value == wanted)
