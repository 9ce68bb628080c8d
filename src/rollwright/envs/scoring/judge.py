"""A judge: the program of a sandbox that makes questions and scores answers, one after the other.

It evaluates nothing of an answer: scorers that would are given readers (`readers`), and any evaluation that is tried all
the same is stopped (`guard`). That is why one process may judge many answers, and may hold what they are compared with.
The sandbox around it is the second line. A judge ends itself, and says so, after many answers, after one that took long
or made a scorer try to evaluate, and when it has grown. Whoever asks keeps the time, and kills it when that is up.
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
    JudgeAsk,
    JudgeMessage,
    JudgeReply,
    JudgeRequest,
    MakingQuestion,
    NoQuestion,
    QuestionStands,
    Result,
)
from rollwright.sandbox.protocol import LENGTH, SandboxLimits, frame

MAX_ANSWERS = 2_000
"""Then another judge takes over: whatever an answer could leave behind does not stay."""

_MAX_QUESTIONS = 256
"""Kept, because an answer often follows its question."""

_QUESTIONS_SHARE, _GROWTH_SHARE = 8, 2
"""Parts of a judge's memory: what kept questions may take, and how much it may grow before it ends."""

_LONG_SECONDS = 1.0
"""Of processor time over one answer: such a judge may have built something large, and ends."""


def prepare() -> None:
    """In the process that judges are forked from."""
    warnings.simplefilter("ignore")  # showing one would open the file of its source
    readers.bind()
    x = sympy.Symbol("x")
    for function in (sympy.sin, sympy.exp, sympy.log, sympy.sqrt):  # sympy loads much when it is first used
        sympy.simplify(sympy.diff(x * function(x), x) - x)


def reads() -> list[Path]:
    """What a judge must be able to read: scorers load modules late."""
    return [Path(str(each.__file__)) for each in (os, numpy, reasoning_gym, sympy)]


def serve(line: int, limits: SandboxLimits) -> None:
    """Until the other side hangs up, or the judge has done its share."""
    guard.install()
    judge = Judge(limits.memory, lambda message: _write(line, message))
    unread = bytearray()
    while not judge.is_done:
        data = os.read(line, 1 << 16)
        if not data:
            return
        unread += data
        while not judge.is_done and (request := _taken(unread)) is not None:
            judge.answer(request)


def _taken(unread: bytearray) -> JudgeRequest | None:
    """The first whole request, which is taken out."""
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
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass
class Judge:
    """Answers requests in their order. Each reply is sent before the next request is begun, so that whoever keeps the
    time knows whose it is."""

    memory: int
    send: Callable[[JudgeMessage], None]
    is_done: bool = False
    _answers: int = 0
    _was_stopped: bool = False
    _questions: "OrderedDict[bytes, tuple[datasets.PosedQuestion, int]]" = field(default_factory=OrderedDict)
    """With the bytes that each made the process grow by."""
    _questions_size: int = 0
    _born_with: int = field(default_factory=_peak)

    def answer(self, request: JudgeRequest) -> None:
        began = time.process_time()
        try:
            result = self._result(request)
        except MemoryError:
            os._exit(1)  # another judge has all its memory for this answer
        self._answers += 1
        self.is_done = (
            self._was_stopped
            or self._answers >= MAX_ANSWERS
            or time.process_time() - began > _LONG_SECONDS
            or _peak() - self._born_with > self.memory // _GROWTH_SHARE
        )
        self.send(JudgeReply(request.id, result, self.is_done))

    def _result(self, request: JudgeRequest) -> Result:
        if request.ask is JudgeAsk.CHECK:
            return datasets.check(request.dataset, request.options) or Entry()
        question = self._question(request)
        if isinstance(question, NoQuestion):
            return question
        if request.ask is JudgeAsk.ENTRY:
            return Entry(question.text, question.known_answer())
        verdict = datasets.judge(question, request.answer)
        self._was_stopped = verdict.was_stopped
        return verdict.score

    def _question(self, request: JudgeRequest) -> datasets.PosedQuestion | NoQuestion:
        key = msgspec.msgpack.encode((request.dataset, request.options, request.seed))
        if key in self._questions:
            self._questions.move_to_end(key)
            return self._questions[key][0]
        self.send(MakingQuestion())
        before = _peak()
        question = datasets.make(request.dataset, request.options, request.seed)
        if isinstance(question, datasets.PosedQuestion):
            self._keep(key, question, _peak() - before)
        self.send(QuestionStands())
        return question

    def _keep(self, key: bytes, question: datasets.PosedQuestion, size: int) -> None:
        self._questions[key] = (question, size)
        self._questions_size += size
        while len(self._questions) > 1 and (
            len(self._questions) > _MAX_QUESTIONS or self._questions_size > self.memory // _QUESTIONS_SHARE
        ):
            self._questions_size -= self._questions.popitem(last=False)[1][1]
