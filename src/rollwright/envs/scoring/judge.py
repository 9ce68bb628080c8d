"""The judge: a sandbox program that creates questions and scores answers, one after the other.

A judge never evaluates an answer as code: scorers that would use parsers instead (`readers`), and any remaining attempt is
stopped (`guard`). So one process can score many answers and hold the reference answers; the sandbox is the second line of
defence. A judge ends itself after its last reply, which says so, when it has scored many answers, has grown, or an answer
took long or was stopped by the guard. The client enforces the time limit and kills a late judge.
"""

import os
import resource
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy
import reasoning_gym
import sympy

from rollwright.envs.scoring import datasets, guard, readers
from rollwright.envs.scoring.protocol import (
    Entry,
    JudgeMessage,
    JudgeOperation,
    JudgeReply,
    JudgeRequest,
    QuestionError,
    QuestionReady,
    QuestionStarted,
    Result,
)
from rollwright.sandbox.protocol import LENGTH, SandboxLimits, frame

MAX_ANSWERS = 2_000
"""Answers per judge; bounds the lifetime of any state that an answer leaves behind."""

_MAX_QUESTIONS = 256
"""Number of cached questions; an answer usually follows its question."""

_QUESTIONS_SHARE, _GROWTH_SHARE = 8, 2
"""Fractions (1/n) of a judge's memory: for cached questions, and for growth before it ends."""

_LONG_SECONDS = 1.0
"""Processor time of one answer after which a judge ends, because it may hold large objects."""


def prepare() -> None:
    """Binds the readers and warms up sympy, in the fork server."""
    warnings.simplefilter("ignore")  # displaying a warning would open its source file
    readers.bind()
    x = sympy.Symbol("x")
    for function in (sympy.sin, sympy.exp, sympy.log, sympy.sqrt):  # sympy imports many modules on first use
        sympy.simplify(sympy.diff(x * function(x), x) - x)


def reads() -> list[Path]:
    """Files that a judge must be able to read, because scorers import modules lazily."""
    return [Path(str(each.__file__)) for each in (os, numpy, reasoning_gym, sympy)]


def serve(line: int, limits: SandboxLimits) -> None:
    """Answers requests until the client closes the socket or the judge is done."""
    guard.install()
    judge = Judge(limits.memory, lambda message: _write(line, message))
    unread = bytearray()
    while not judge.is_done:
        data = os.read(line, 1 << 16)
        if not data:
            return
        unread += data
        while not judge.is_done and (request := _pop_request(unread)) is not None:
            judge.answer(request)


def _pop_request(unread: bytearray) -> JudgeRequest | None:
    """Removes and returns the first complete request in the buffer; `None`: there is none."""
    if len(unread) < LENGTH.size:
        return None
    end = LENGTH.size + LENGTH.unpack_from(unread)[0]
    if len(unread) < end:
        return None
    body = bytes(unread[LENGTH.size : end])
    del unread[:end]
    return msgspec.msgpack.decode(body, type=JudgeRequest)


def _write(line: int, message: JudgeMessage) -> None:
    data = frame(message)
    while data:
        data = data[os.write(line, data) :]


def _peak() -> int:
    """Peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass
class Judge:
    """Answers requests in order. Each reply is sent before the next request starts, so that the client, which enforces the
    time limit, knows which request is running."""

    memory: int
    send: Callable[[JudgeMessage], None]
    is_done: bool = False
    _answers: int = 0
    _was_stopped: bool = False
    _questions: "OrderedDict[bytes, tuple[datasets.PosedQuestion, int]]" = field(default_factory=OrderedDict)
    """Cached questions with the growth of the process that each caused, in bytes."""
    _questions_size: int = 0
    _born_with: int = field(default_factory=_peak)

    def answer(self, request: JudgeRequest) -> None:
        """Processes a request and sends its reply."""
        began = time.process_time()
        try:
            result = self._result(request)
        except MemoryError:
            os._exit(1)  # the client retries in a fresh judge, which has its full memory for this answer
        self._answers += 1
        self.is_done = (
            self._was_stopped
            or self._answers >= MAX_ANSWERS
            or time.process_time() - began > _LONG_SECONDS
            or _peak() - self._born_with > self.memory // _GROWTH_SHARE
        )
        self.send(JudgeReply(request.id, result, self.is_done))

    def _result(self, request: JudgeRequest) -> Result:
        if request.ask is JudgeOperation.CHECK:
            return datasets.check(request.dataset, request.options) or Entry()
        question = self._question(request)
        if isinstance(question, QuestionError):
            return question
        if request.ask is JudgeOperation.ENTRY:
            return Entry(question.text, question.known_answer())
        verdict = datasets.judge(question, request.answer)
        self._was_stopped = verdict.was_stopped
        return verdict.score

    def _question(self, request: JudgeRequest) -> datasets.PosedQuestion | QuestionError:
        key = msgspec.msgpack.encode((request.dataset, request.options, request.seed))
        if key in self._questions:
            self._questions.move_to_end(key)
            return self._questions[key][0]
        self.send(QuestionStarted())
        before = _peak()
        question = datasets.make(request.dataset, request.options, request.seed)
        if isinstance(question, datasets.PosedQuestion):
            self._cache(key, question, _peak() - before)
        self.send(QuestionReady())
        return question

    def _cache(self, key: bytes, question: datasets.PosedQuestion, size: int) -> None:
        self._questions[key] = (question, size)
        self._questions_size += size
        while len(self._questions) > 1 and (
            len(self._questions) > _MAX_QUESTIONS or self._questions_size > self.memory // _QUESTIONS_SHARE
        ):
            self._questions_size -= self._questions.popitem(last=False)[1][1]
