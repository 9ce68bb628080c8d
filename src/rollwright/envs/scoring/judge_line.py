"""One judge and its requests, as seen from outside its sandbox.

True of it: the first of its requests is the one it works on, and `deadline` is when that one's time is up; what it says is
data, and a judge that says anything else has ended.
"""

import socket
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from rollwright.envs.scoring.protocol import JudgeAsk, JudgeMessage, JudgeRequest, Result
from rollwright.sandbox.protocol import LENGTH, Exited, Ready

QUESTION_SECONDS = 60.0
"""For making a question; the slowest dataset takes about one."""

_MAX_MESSAGE = 1 << 22
"""Bytes: a judge that says more at once is not what it was."""

JudgeWord = Ready | Exited | JudgeMessage
"""What comes over a judge's line: the sandbox's first and last word, and the judge's own."""
_decoder = msgspec.msgpack.Decoder(JudgeWord)


@dataclass(eq=False)
class PendingRequest:
    request: JudgeRequest
    outcome: "Future[Result]" = field(default_factory=Future)
    deaths: int = 0
    """Judges that died over it."""

    @property
    def place(self) -> tuple[str, int]:
        """Which judge is likely to have its question. Options are left out: a wrong guess costs a little time."""
        return self.request.dataset, self.request.seed


@dataclass(eq=False)
class JudgeLine:
    """A judge, as far as it is known here."""

    line: socket.socket
    maker: int
    """Process that it was forked from."""
    deadline: float
    is_ready: bool = False
    is_making: bool = False
    """Whether it is making the question of its first request."""
    has_ended: bool = False
    queue: deque[PendingRequest] = field(default_factory=deque)
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)

    def send(self, data: bytes = b"") -> None:
        """As much as goes without waiting; the thread sends the rest."""
        self.unsent += data
        with suppress(BlockingIOError, ConnectionError):  # a dead judge is noticed by who reads
            while self.unsent:
                del self.unsent[: self.line.send(self.unsent)]

    def receive(self) -> Iterator[JudgeWord]:
        """What has come; `has_ended` afterwards if nothing more will."""
        try:
            data = self.line.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.has_ended = not data
        self.unread += data
        while len(self.unread) >= LENGTH.size:
            length = LENGTH.unpack_from(self.unread)[0]
            end = LENGTH.size + length
            if length > _MAX_MESSAGE:
                self.has_ended = True
                return
            if len(self.unread) < end:
                return
            body = bytes(self.unread[LENGTH.size : end])
            del self.unread[:end]
            try:
                yield _decoder.decode(body)
            except (msgspec.MsgspecError, ValueError):
                self.has_ended = True
                return

    def begin_next(self, now: float) -> None:
        """The first request's time runs from now on."""
        self.is_making = False
        if self.queue:
            request = self.queue[0].request
            self.deadline = now + (request.seconds if request.ask is JudgeAsk.SCORE else QUESTION_SECONDS)
