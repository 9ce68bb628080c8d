"""Reward for mathematical answers, compared by the package math-verify in a sandboxed process.

Always true: each answer has a sandbox of its own, which ends with the comparison, so an answer affects neither another one
nor this process. An answer that exceeds its limits of CPU time or memory is not verified and scores 0. A sandbox that
cannot start, a task that cannot be parsed and an exceeded time limit are failures.
"""

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from rollwright.errors import ConfigError
from rollwright.rewards.checks import texts_of
from rollwright.rewards.failure import NoReward
from rollwright.rewards.functions import Value
from rollwright.rewards.math_messages import MathQuestion, MathVerdict
from rollwright.rewards.scored import ScoredAttempt
from rollwright.rewards.settings import MathVerifyReward
from rollwright.sandbox.client import ForkServer, Sandbox, SandboxError
from rollwright.sandbox.protocol import SandboxLimits

PROGRAM = "rollwright.rewards.math_program"

MAX_ANSWER = 20_000
"""Limit of characters of an answer; a longer one scores 0."""

_BY_SIGNAL = "ended by signal"
"""Part of the error of a sandbox whose process was killed by the kernel, as its resource limits do."""

_PACKAGES = ("math_verify", "latex2sympy2_extended", "antlr4", "sympy", "mpmath")
"""Packages that the comparison imports."""


class MathVerify:
    """See `MathVerifyReward`."""

    def __init__(self, name: str, settings: MathVerifyReward) -> None:
        missing = [each for each in _PACKAGES if find_spec(each) is None]
        if missing:
            raise ConfigError(
                f"reward {name}: math_verify needs the package `math-verify`: pip install rollwright[rewards]"
            )
        self._settings = settings
        self._allow_unconfined = settings.allow_unconfined
        self._limits = SandboxLimits(
            seconds=settings.time_limit,
            cpu_seconds=settings.cpu_seconds,
            memory=settings.memory_mb << 20,
            threads=1,
        )
        self._starter = ForkServer(PROGRAM, _package_folders())
        self._is_confined = True
        self._places = asyncio.Semaphore(settings.concurrency)

    async def evaluate(self, attempt: ScoredAttempt) -> Value:
        right = texts_of(attempt.task_field(self._settings.field), self._settings.field)
        if len(attempt.answer) > MAX_ANSWER:
            return 0.0
        question = msgspec.json.encode(MathQuestion(tuple(right), _sendable(attempt.answer))).decode()
        async with self._places:
            sandbox = await self._open()
            try:
                ran = await sandbox.run(question)
            finally:
                sandbox.close()
        if ran.is_late:
            raise NoReward(f"no verdict within {self._settings.time_limit:g} s")
        if ran.has_ended and _BY_SIGNAL in ran.error:
            return 0.0  # killed by its limits
        if ran.has_ended:
            raise NoReward(f"the process that compares answers ended: {ran.error}")
        verdict = msgspec.json.decode(ran.output, type=MathVerdict)
        if verdict.problem:
            raise NoReward(f"the task's {self._settings.field!r}: {verdict.problem}")
        return float(verdict.is_right)

    async def close(self) -> None:
        self._starter.close()

    async def _open(self) -> Sandbox:
        try:
            sandbox = Sandbox(self._starter.start(self._limits, is_confined=self._is_confined), self._limits)
            missing = await sandbox.wait_until_ready()
            if missing and self._is_confined and self._allow_unconfined:
                self._is_confined = False
                return await self._open()
        except SandboxError as error:
            raise NoReward(str(error)) from error
        if missing:
            raise NoReward(f"no sandbox for comparing answers on this machine; missing is {missing}")
        return sandbox


def _sendable(text: str) -> str:
    """The text with lone surrogates replaced, so that it can be encoded."""
    return text.encode(errors="replace").decode()


def _package_folders() -> list[Path]:
    """Folders in which math-verify and its dependencies are installed."""
    places = [Path(each) for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    for package in _PACKAGES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            places.append(Path(spec.origin).parent.parent)
    return [each for each in dict.fromkeys(places) if each.is_dir()]
