"""The process in which reasoning-gym runs: it makes questions and scores answers, one fork for each.

Some scorers evaluate the answer as code. So no answer is ever scored in a process that does anything
else: this one only imports the datasets, reads requests from its standard input, and forks. The fork makes
the question again from its seed, locks itself in (`confinement`), scores, writes the result to its own pipe
and ends. What an answer breaks ends with its fork; the next one starts from the same clean state.

Requests and replies are frames: four bytes of length, then msgpack. The process ends when its input ends,
or when nobody asked for anything in a while. `rollwright.envs.scoring` is the other end.
"""

import json
import os
import random
import selectors
import signal
import struct
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, BinaryIO

import msgspec

from rollwright.envs.confinement import confine, leave_network

IDLE_SECONDS = 120.0
"""After so long without a request the process ends and gives its memory (about 110 MB) back."""

QUESTION_SECONDS = 60.0
"""For making a question; the slowest dataset takes about one second."""

_RESULT_BYTES = 1 << 20
"""A fork that writes more than this is broken."""

_READY = b"+"
"""What a fork writes when the question stands and the answer's time begins."""

_FORKS_AT_ONCE = max(2, os.cpu_count() or 1)

_LENGTH = struct.Struct(">I")


class Ask(StrEnum):
    CHECK = "check"
    """Do the dataset and its options exist? Answered with an empty `Entry`."""
    ENTRY = "entry"
    """The question of a seed."""
    SCORE = "score"
    """What an answer is worth."""


class Request(msgspec.Struct, frozen=True):
    id: int
    ask: Ask
    dataset: str
    options: dict[str, Any]
    seed: int = 0
    answer: str = ""
    seconds: float = 0.0
    """For scoring the answer, once the question stands."""
    memory: int = 0
    """Bytes that scoring may take beyond what the process starts with."""


class Entry(msgspec.Struct, frozen=True, tag="entry"):
    question: str = ""
    answer: str | None = None
    """One that the scorer gives full marks; `None`: the dataset has none."""


class Score(msgspec.Struct, frozen=True, tag="score"):
    value: float
    killed: bool = False
    """The answer took too much time or memory to score."""
    failed: bool = False
    """The scorer raised on the answer."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The dataset or its options are wrong, or the question could not be made."""

    message: str
    config: bool
    """Whether the user can set it right."""
    known: tuple[str, ...] = ()
    """Names that would have been accepted in place of `unknown`."""
    unknown: str | None = None


Result = Entry | Score | Refusal


class Hello(msgspec.Struct, frozen=True):
    """The first frame: the process is ready, or why it is not."""

    error: str | None = None
    sealed: bool = False
    """Whether a trial fork could neither make a file nor start a process."""


class Reply(msgspec.Struct, frozen=True):
    id: int
    result: msgspec.Raw


def write_frame(to: BinaryIO, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    to.write(_LENGTH.pack(len(body)) + body)
    to.flush()


def read_frame(source: BinaryIO) -> bytes | None:
    """`None` at the end of the stream."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    body = source.read(_LENGTH.unpack(head)[0])
    return body if len(body) == _LENGTH.unpack(head)[0] else None


@dataclass
class _Fork:
    """A request being worked on."""

    request: Request
    pid: int
    pipe: int
    deadline: float
    written: bytearray = field(default_factory=bytearray)

    @property
    def ready(self) -> bool:
        return self.written.startswith(_READY)


class _Server:
    """Reads requests and hands out replies; never runs a dataset's code itself."""

    def __init__(self, requests: int, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._unread = bytearray()
        self._waiting: deque[Request] = deque()
        self._forks: dict[int, _Fork] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._decode = msgspec.msgpack.Decoder(Request).decode

    def serve(self) -> None:
        idle_since = time.monotonic()
        while True:
            now = time.monotonic()
            if self._forks:
                idle_since = now
            elif now - idle_since > IDLE_SECONDS:
                return
            for key, _ in self._selector.select(self._patience(now)):
                if key.fd == self._requests:
                    if not self._take_requests():
                        return
                    idle_since = now
                else:
                    self._read(self._forks[key.fd])
            self._end_late_forks()
            while self._waiting and len(self._forks) < _FORKS_AT_ONCE:
                self._start(self._waiting.popleft())

    def _patience(self, now: float) -> float:
        return max(0.0, min((fork.deadline for fork in self._forks.values()), default=now + IDLE_SECONDS) - now)

    def _take_requests(self) -> bool:
        data = os.read(self._requests, 1 << 16)
        self._unread += data
        while len(self._unread) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                break
            self._waiting.append(self._decode(bytes(self._unread[_LENGTH.size : end])))
            del self._unread[:end]
        return bool(data)

    def _start(self, request: Request) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            _in_fork(request, write_end)
        os.close(write_end)
        self._selector.register(read_end, selectors.EVENT_READ)
        self._forks[read_end] = _Fork(request, pid, read_end, time.monotonic() + QUESTION_SECONDS)

    def _read(self, fork: _Fork) -> None:
        was_ready = fork.ready
        data = os.read(fork.pipe, 1 << 16)
        fork.written += data
        if fork.ready and not was_ready:
            fork.deadline = time.monotonic() + fork.request.seconds
        if not data or len(fork.written) > _RESULT_BYTES:
            self._finish(fork)

    def _end_late_forks(self) -> None:
        now = time.monotonic()
        for fork in [each for each in self._forks.values() if each.deadline <= now]:
            self._finish(fork)

    def _finish(self, fork: _Fork) -> None:
        self._selector.unregister(fork.pipe)
        del self._forks[fork.pipe]
        os.close(fork.pipe)
        os.kill(fork.pid, signal.SIGKILL)  # it has ended, or it has to
        os.waitpid(fork.pid, 0)
        write_frame(self._replies, Reply(fork.request.id, _result(fork)))


def _result(fork: _Fork) -> msgspec.Raw:
    """What the fork wrote, if that is a result: an answer's code may have written anything."""
    body = bytes(fork.written.removeprefix(_READY))
    scoring = fork.request.ask is Ask.SCORE and fork.ready
    try:
        result = msgspec.msgpack.decode(body, type=Result)
    except msgspec.MsgspecError:
        result = Score(0.0, killed=True) if scoring else Refusal("the question could not be made in time", False)
    if scoring and not isinstance(result, Score):
        result = Score(0.0, failed=True)
    return msgspec.Raw(msgspec.msgpack.encode(result))
