"""The scoring process: reads requests from its standard input, and forks once for each.

Some of reasoning-gym's scorers evaluate the answer as code. So this process only imports the datasets and
forks; the fork makes the question again from its seed, locks itself in, scores, writes the result to its
own pipe and ends. Whatever an answer breaks ends with its fork, and the next one starts from the same clean
state, in milliseconds, because nothing has to be imported again.

Every request gets exactly one reply. The process ends when its input does, or when it was idle for long.
"""

import gc
import os
import selectors
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import IO, NoReturn

import msgspec

from rollwright.envs.scoring.confinement import confine, leave_network
from rollwright.envs.scoring.messages import Hello, Refusal, Reply, Request, Result, Score
from rollwright.sandbox.frames import LENGTH, write_frame

IDLE_SECONDS = 120.0
"""After so long without a request it ends, which gives about 110 MB back."""

QUESTION_SECONDS = 60.0
"""For making a question; the slowest dataset takes about one."""

_MAX_RESULT = 1 << 20
"""Bytes: a fork that writes more is broken."""

_MAX_FORKS = max(2, os.cpu_count() or 1)
"""Scoring is computing: more at once than there are processors would only take time from each other."""

_READY = b"+"
"""A fork writes this when its question stands: from here on the answer's time runs."""

_PIPE = 3
"""The number of a fork's only open file beside the three standard ones."""

_MAX_FILE = 4096
"""No file of this process has a higher number: it holds one pipe for each fork."""

Responder = Callable[[Request, Callable[[], None]], Result]
"""Answers a request, and calls its second argument before any code sees the answer in it."""


@dataclass
class _Fork:
    """A request that is being worked on."""

    request: Request
    pid: int
    pipe: int
    deadline: float
    written: bytearray = field(default_factory=bytearray)

    @property
    def is_ready(self) -> bool:
        return self.written.startswith(_READY)

    def result(self) -> Result:
        """What it wrote, if that makes sense: the code in an answer may have written anything."""
        try:
            result = msgspec.msgpack.decode(bytes(self.written.removeprefix(_READY)), type=Result)
        except msgspec.MsgspecError:
            result = None
        if self.is_ready:
            return result if isinstance(result, Score) and 0 <= result.value <= 1 else Score(0.0, killed=True)
        return result or Refusal(
            f"{self.request.dataset}: making the question failed or took too long", False
        )


class _Server:
    """Starts forks, ends those that are late, and passes on what they say."""

    def __init__(self, requests: int, replies: IO[bytes], respond: Responder) -> None:
        self._requests = requests
        self._replies = replies
        self._respond = respond
        self._unread = bytearray()
        self._waiting: deque[Request] = deque()
        self._forks: dict[int, _Fork] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)

    def serve(self) -> None:
        idle_until = time.monotonic() + IDLE_SECONDS
        while self._forks or time.monotonic() < idle_until:
            next_deadline = min((fork.deadline for fork in self._forks.values()), default=idle_until)
            for key, _ in self._selector.select(max(0.0, next_deadline - time.monotonic())):
                if key.fd != self._requests:
                    self._read(self._forks[key.fd])
                elif not self._take_requests():
                    return
                idle_until = time.monotonic() + IDLE_SECONDS
            now = time.monotonic()
            for fork in [each for each in self._forks.values() if each.deadline <= now]:
                self._finish(fork)
            while self._waiting and len(self._forks) < _MAX_FORKS:
                self._start(self._waiting.popleft())

    def _take_requests(self) -> bool:
        """False at the end of the input."""
        data = os.read(self._requests, 1 << 16)
        self._unread += data
        while len(self._unread) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                break
            body = bytes(self._unread[LENGTH.size : end])
            self._waiting.append(msgspec.msgpack.decode(body, type=Request))
            del self._unread[:end]
        return bool(data)

    def _start(self, request: Request) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            _work(request, write_end, self._respond)
        os.close(write_end)
        self._selector.register(read_end, selectors.EVENT_READ)
        self._forks[read_end] = _Fork(request, pid, read_end, time.monotonic() + QUESTION_SECONDS)

    def _read(self, fork: _Fork) -> None:
        was_ready = fork.is_ready
        data = os.read(fork.pipe, 1 << 16)
        fork.written += data
        if fork.is_ready and not was_ready:
            fork.deadline = time.monotonic() + fork.request.seconds
        if not data or len(fork.written) > _MAX_RESULT:
            self._finish(fork)

    def _finish(self, fork: _Fork) -> None:
        self._selector.unregister(fork.pipe)
        del self._forks[fork.pipe]
        os.close(fork.pipe)
        os.kill(fork.pid, signal.SIGKILL)  # it has ended, or it has to
        os.waitpid(fork.pid, 0)
        write_frame(self._replies, Reply(fork.request.id, fork.result()))


def _work(request: Request, pipe: int, respond: Responder) -> NoReturn:
    """The fork's whole life."""
    try:
        os.dup2(pipe, _PIPE)
        os.closerange(_PIPE + 1, _MAX_FILE)
        result = respond(request, partial(_lock_in, request))
        os.write(_PIPE, msgspec.msgpack.encode(result))
    finally:
        os._exit(0)


def _lock_in(request: Request) -> None:
    confine(request.memory, request.seconds)
    os.write(_PIPE, _READY)


def _is_sealed() -> bool:
    """Tries, in a fork, what a hostile answer would."""
    pid = os.fork()
    if pid == 0:
        escaped = 0
        try:
            confine(memory=1 << 26, cpu_seconds=1.0)
            for attempt in (partial(os.open, "trial", os.O_CREAT | os.O_WRONLY), os.fork):
                try:
                    attempt()
                except OSError:
                    continue
                escaped = 1
        finally:
            os._exit(escaped)
    return os.waitpid(pid, 0)[1] == 0


def main() -> None:
    requests, replies = os.dup(0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):  # what a scorer prints must not mix with the replies
        os.dup2(nothing, standard)
    os.close(nothing)
    leave_network()
    try:
        from rollwright.envs.scoring.datasets import respond
    except ImportError as error:
        write_frame(replies, Hello(error=f"reasoning-gym cannot be imported: {error}"))
        return
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        is_sealed = _is_sealed()
    # From here on the working folder does not exist: there is nothing in it, and nothing can be made in it.
    gc.collect()
    gc.freeze()  # a fork then copies only the memory it changes
    write_frame(replies, Hello(is_sealed=is_sealed))
    _Server(requests, replies, respond).serve()


if __name__ == "__main__":
    main()
