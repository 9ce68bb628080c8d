"""Client side of one judge: its socket, its queue of requests and its deadline.

Always true: the judge works on the first request of the queue, and `deadline` is the time limit of that request. A judge
that sends a malformed message counts as ended.
"""

import socket
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from rollwright.envs.scoring.protocol import JudgeMessage, JudgeOperation, JudgeRequest, Result
from rollwright.sandbox.protocol import LENGTH, Exited, Ready

QUESTION_SECONDS = 60.0
"""Time limit for creating a question; the slowest dataset takes about one second."""

_MAX_MESSAGE = 1 << 22
"""Bytes of one message; a longer one is malformed."""

JudgeOutput = Ready | Exited | JudgeMessage
"""Messages on a judge's socket: the sandbox's first and last message, and the judge's own."""
_decoder = msgspec.msgpack.Decoder(JudgeOutput)


@dataclass(eq=False)
class PendingRequest:
    """A request with its future."""

    request: JudgeRequest
    outcome: "Future[Result]" = field(default_factory=Future)
    deaths: int = 0
    """Number of judges that died while working on it."""

    @property
    def question_key(self) -> tuple[str, int]:
        """Key for finding the judge that has the question cached. It omits the options, because a wrong guess only costs a
        little time."""
        return self.request.dataset, self.request.seed


@dataclass(eq=False)
class JudgeConnection:
    """Connection to one judge."""

    line: socket.socket
    fork_server: int
    """Process id of the fork server that started it."""
    deadline: float
    is_ready: bool = False
    is_creating: bool = False
    """Whether it is creating the question of its first request."""
    has_ended: bool = False
    queue: deque[PendingRequest] = field(default_factory=deque)
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)

    def send(self, data: bytes = b"") -> None:
        """Sends as much as possible without blocking; the pool's thread sends the rest."""
        self.unsent += data
        with suppress(BlockingIOError, ConnectionError):  # `receive` notices a dead judge
            while self.unsent:
                del self.unsent[: self.line.send(self.unsent)]

    def receive(self) -> Iterator[JudgeOutput]:
        """Yields the messages that have arrived; sets `has_ended` at the end of the stream."""
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

    def start_deadline(self, now: float) -> None:
        """Starts the time limit of the first request."""
        self.is_creating = False
        if self.queue:
            request = self.queue[0].request
            self.deadline = now + (
                request.seconds if request.ask is JudgeOperation.SCORE else QUESTION_SECONDS
            )
