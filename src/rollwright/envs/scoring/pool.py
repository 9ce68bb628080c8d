"""The pool of judges: dispatches requests, enforces time limits and replaces judges.

Always true: a judge has at most `_DEPTH` requests in order and works on the first; a judge that is late, dead or sends a
malformed message is dropped at once; the pool shuts down after `IDLE_SECONDS` without requests, which frees its memory.
One lock protects all state; the pool's thread does not hold it while it waits for messages.
"""

import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from contextlib import suppress

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.scoring.judge_connection import (
    QUESTION_SECONDS,
    JudgeConnection,
    JudgeOutput,
    PendingRequest,
)
from rollwright.envs.scoring.protocol import (
    JudgeOperation,
    JudgeReply,
    JudgeRequest,
    QuestionError,
    QuestionReady,
    QuestionStarted,
    Result,
    Score,
)
from rollwright.sandbox.client import ForkServer, SandboxError, package_folders
from rollwright.sandbox.protocol import Ready, SandboxLimits, frame

UNCONFINED_VARIABLE = "ROLLWRIGHT_UNCONFINED_SCORING"
"""Environment variable: 1 lets judges run with rlimits only on a machine that cannot confine them; never as root."""

IDLE_SECONDS = 120.0
"""Idle time after which the judges end, which frees about 150 MB."""

START_SECONDS = 120.0
"""Timeout for the first judge, whose fork server imports reasoning-gym (about 3 s on an idle machine)."""

MAX_JUDGES = max(2, os.cpu_count() or 1)
"""Scoring is CPU-bound: more judges than processors would only slow each other down."""

_DEPTH = 2
"""Requests per judge: the next one is already queued when one is done."""

_MAX_DEATHS = 2
"""Judges that may die during one request, or in succession before they are ready."""

_CPU_SECONDS = 3_600
"""Processor time of a judge over its lifetime of some thousand answers; the pool enforces the limit per answer."""

_TICK_SECONDS = 0.2
"""Interval at which deadlines are checked while requests are pending."""

_LOOKAHEAD = 32
"""Waiting requests that are searched for one whose question a judge has cached."""

_MAX_AFFINITIES = 4_096
"""Questions for which the pool remembers the judge that has them cached."""

_log = logging.getLogger(__name__)


class JudgePool:
    """Dispatches requests to judges; thread-safe."""

    def __init__(self, memory: int, *, allow_unconfined: bool = False) -> None:
        self._limits = SandboxLimits(cpu_seconds=_CPU_SECONDS, memory=memory, disk=1 << 20, threads=1)
        self._allow_unconfined = allow_unconfined
        self._is_confined = True
        self.fork_server = ForkServer("rollwright.envs.scoring.judge", package_folders("reasoning_gym"))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake: socket.socket | None = None
        self._sleeps_until = 0.0
        self._busy_at = 0.0
        self._failed_starts = 0
        self._dead_fork_server = 0
        self._waiting: deque[PendingRequest] = deque()
        self._judges: list[JudgeConnection] = []
        self._affinity: OrderedDict[tuple[str, int], JudgeConnection] = OrderedDict()
        self._done: list[tuple[PendingRequest, Result | EnvironmentFailure]] = []

    def submit(self, request: JudgeRequest) -> "Future[Result]":
        """Queues a request and returns its future."""
        pending = PendingRequest(request)
        with self._lock:
            self._waiting.append(pending)
            self._busy_at = time.monotonic()
            self._dispatch()
            if self._thread is None:
                self._start_thread()
            elif self._needs_thread():
                self._wake_thread()
        return pending.outcome

    def close(self) -> None:
        """Ends all judges and fails their requests; a later request starts new judges."""
        with self._lock:
            thread = self._thread
            for judge in self._judges:
                self._waiting.extend(judge.queue)
                judge.line.close()
            self._judges.clear()
            self._affinity.clear()
            for pending in self._waiting:
                self._done.append((pending, EnvironmentFailure("the scoring process was closed")))
            self._waiting.clear()
            self._release_thread()
            self.fork_server.close()
        self._settle()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """Drops the judges in a forked child of this process; they belong to the parent."""
        self._lock = threading.Lock()
        for judge in self._judges:
            judge.line.close()
        if self._wake is not None:
            self._wake.close()
        self._judges, self._thread, self._wake = [], None, None
        self.fork_server.abandon()

    # All methods below are called with the lock held, except `_run`, `_serve` and `_settle`.

    def _dispatch(self) -> None:
        """Assigns waiting requests to judges with room. An idle judge takes any request. Only when no more judges can be
        started does a busy judge take a further request, and then one that suits its cached questions."""
        depth = 1 if len(self._judges) < MAX_JUDGES else _DEPTH
        while self._waiting:
            free = sorted((each for each in self._judges if each.is_ready), key=lambda each: len(each.queue))
            found = next(
                (
                    (judge, pending)
                    for judge in free
                    if len(judge.queue) < depth and (pending := self._select_request(judge)) is not None
                ),
                None,
            )
            if found is None:
                return
            self._assign(*found)

    def _select_request(self, judge: JudgeConnection) -> PendingRequest | None:
        """First of the next waiting requests whose question this judge, or no judge, has cached."""
        for pending in itertools.islice(self._waiting, _LOOKAHEAD):
            cached_by = self._affinity.get(pending.question_key)
            if cached_by is judge or cached_by not in self._judges:
                return pending
        return None if judge.queue else self._waiting[0]

    def _assign(self, judge: JudgeConnection, pending: PendingRequest) -> None:
        self._waiting.remove(pending)
        if pending.outcome.cancelled():
            return  # its caller was cancelled
        judge.queue.append(pending)
        if len(judge.queue) == 1:
            judge.start_deadline(time.monotonic())
        self._affinity[pending.question_key] = judge
        self._affinity.move_to_end(pending.question_key)
        if len(self._affinity) > _MAX_AFFINITIES:
            self._affinity.popitem(last=False)
        judge.send(frame(pending.request))

    def _needs_thread(self) -> bool:
        """Whether the thread must wake before a judge's next message: to start a judge, to send data, or to check deadlines."""
        return (
            (bool(self._waiting) and len(self._judges) < MAX_JUDGES)
            or any(each.unsent for each in self._judges)
            or self._sleeps_until > self._busy_at + _TICK_SECONDS
        )

    def _start_thread(self) -> None:
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        self._wake = ours
        self._thread = threading.Thread(target=self._run, args=(theirs,), name="scoring", daemon=True)
        self._thread.start()

    def _wake_thread(self) -> None:
        if self._wake is not None:
            with suppress(OSError):
                self._wake.send(b".")

    def _release_thread(self) -> None:
        self._wake_thread()
        if self._wake is not None:
            self._wake.close()
        self._thread = self._wake = None

    def _run(self, woken: socket.socket) -> None:
        """Main function of the pool's thread."""
        try:
            self._serve(woken)
        except BaseException:
            _log.exception("the thread of the judge pool failed")
            self.close()  # fails all requests, so that no caller waits forever
            raise

    def _serve(self, woken: socket.socket) -> None:
        """Serves judges until the pool is closed or idle."""
        with woken, selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            watched: dict[JudgeConnection, int] = {}
            while True:
                with self._lock:
                    if self._thread is not threading.current_thread():
                        return
                    self._start_judges()
                    self._watch(selector, watched)
                    now = time.monotonic()
                    timeout = self._timeout(now)
                    self._sleeps_until = now + timeout
                    has_results = bool(self._done)
                if has_results:
                    self._settle()
                events = selector.select(timeout)
                with self._lock:
                    if self._thread is not threading.current_thread():
                        return
                    for key, _ in events:
                        if isinstance(key.data, JudgeConnection):
                            self._receive(key.data)
                        else:
                            with suppress(BlockingIOError):
                                woken.recv(1 << 12)
                    self._kill_late(time.monotonic())
                    self._dispatch()
                    if self._is_idle():
                        self._shut_down()
                        return
                self._settle()

    def _settle(self) -> None:
        """Sets the results of futures, without the lock, because a callback may submit a request at once."""
        with self._lock:
            done, self._done = self._done, []
        for pending, result in done:
            if not pending.outcome.set_running_or_notify_cancel():
                continue  # its caller was cancelled
            if isinstance(result, EnvironmentFailure):
                pending.outcome.set_exception(result)
            else:
                pending.outcome.set_result(result)

    def _watch(self, selector: selectors.BaseSelector, watched: dict[JudgeConnection, int]) -> None:
        """Updates the selector: reads from all judges, and writes to those with unsent data."""
        for judge in [each for each in watched if each not in self._judges]:
            selector.unregister(judge.line)
            judge.line.close()
            del watched[judge]
        for judge in self._judges:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if judge.unsent else 0)
            if judge not in watched:
                selector.register(judge.line, events, judge)
            elif watched[judge] != events:
                selector.modify(judge.line, events, judge)
            watched[judge] = events

    def _timeout(self, now: float) -> float:
        is_busy = bool(self._waiting) or any(each.queue or not each.is_ready for each in self._judges)
        if not is_busy and now - self._busy_at > 10 * _TICK_SECONDS:
            return max(0.0, self._busy_at + IDLE_SECONDS - now)
        deadlines = [each.deadline for each in self._judges if each.queue or not each.is_ready]
        return max(0.0, min([now + _TICK_SECONDS, *deadlines]) - now)

    def _start_judges(self) -> None:
        """Starts one judge per waiting request, up to `MAX_JUDGES`."""
        starting = sum(not each.is_ready for each in self._judges)
        while len(self._judges) < MAX_JUDGES and starting < len(self._waiting):
            try:
                line = self.fork_server.start(self._limits, is_confined=self._is_confined)
            except SandboxError as error:
                self._fail_waiting(str(error))
                return
            pid = self.fork_server.process.pid if self.fork_server.process is not None else 0
            self._judges.append(JudgeConnection(line, pid, time.monotonic() + START_SECONDS))
            starting += 1

    def _receive(self, judge: JudgeConnection) -> None:
        judge.send()
        for message in judge.receive() if judge in self._judges else ():
            self._handle(judge, message)
            if judge not in self._judges:
                return
        if judge.has_ended and judge in self._judges:
            self._handle_death(judge, is_own_death=False)  # no `Exited` came: its fork server or monitor died

    def _handle(self, judge: JudgeConnection, message: JudgeOutput) -> None:
        now = time.monotonic()
        match message:
            case Ready():
                self._handle_ready(judge, message)
            case QuestionStarted():
                judge.is_creating, judge.deadline = True, now + QUESTION_SECONDS
            case QuestionReady():
                judge.start_deadline(now)
            case JudgeReply() if judge.queue and judge.queue[0].request.id == message.id:
                self._complete(judge, message)
            case _:  # `Exited`, or a reply that no request matches
                self._handle_death(judge, is_own_death=True)

    def _complete(self, judge: JudgeConnection, reply: JudgeReply) -> None:
        self._done.append((judge.queue.popleft(), reply.result))
        self._busy_at = time.monotonic()
        judge.start_deadline(self._busy_at)
        if reply.is_last:
            self._drop(judge)

    def _handle_ready(self, judge: JudgeConnection, ready: Ready) -> None:
        if not ready.missing:
            judge.is_ready = True
            self._failed_starts = 0
            return
        self._drop(judge)
        if self._is_confined and self._allow_unconfined:
            _log.warning("answers are scored with limits only; missing is %s", ready.missing)
            self._is_confined = False
            return
        hint = (
            "" if self._allow_unconfined else f"; {UNCONFINED_VARIABLE}=1 would judge them with limits only"
        )
        self._fail_waiting(
            f"answers to reasoning_gym cannot be judged on this machine; missing is {ready.missing}{hint}"
        )

    def _fail_waiting(self, problem: str) -> None:
        for pending in self._waiting:
            self._done.append((pending, EnvironmentFailure(problem)))
        self._waiting.clear()

    def _kill_late(self, now: float) -> None:
        for judge in [each for each in self._judges if each.deadline <= now]:
            if not judge.is_ready:
                self._drop(judge)
                self._fail_waiting(f"no judge was ready within {START_SECONDS:g} s")
            elif judge.queue:
                self._fail_first(judge)
                self._drop(judge)

    def _handle_death(self, judge: JudgeConnection, *, is_own_death: bool) -> None:
        """Handles the death of a judge. `is_own_death`: its own process exited; otherwise the fork server died."""
        if judge.queue:
            first = judge.queue[0]
            first.deaths += 1
            if first.deaths >= _MAX_DEATHS:
                if is_own_death:
                    self._fail_first(judge)
                else:
                    failure = EnvironmentFailure(f"{first.deaths} scoring processes died during a request")
                    self._done.append((judge.queue.popleft(), failure))
        elif not judge.is_ready:
            if (
                is_own_death or judge.fork_server != self._dead_fork_server
            ):  # judges of one fork server that die together count once
                self._failed_starts += 1
            self._dead_fork_server = judge.fork_server
            if self._failed_starts >= _MAX_DEATHS:
                self._failed_starts = 0
                self._fail_waiting("a judge ended before it was ready")
        self._drop(judge)

    def _fail_first(self, judge: JudgeConnection) -> None:
        first = judge.queue.popleft()
        if first.request.ask is JudgeOperation.SCORE and not judge.is_creating:
            self._done.append((first, Score(0.0, killed=True)))
        else:
            message = f"{first.request.dataset}: creating the question failed or took too long"
            self._done.append((first, QuestionError(message, False)))

    def _drop(self, judge: JudgeConnection) -> None:
        """Removes a judge; its requests return to the front of the queue in their order."""
        self._judges.remove(judge)
        with suppress(OSError):
            judge.line.shutdown(socket.SHUT_RDWR)
        for pending in reversed(judge.queue):
            self._waiting.appendleft(pending)
        judge.queue.clear()

    def _is_idle(self) -> bool:
        is_busy = bool(self._waiting) or any(each.queue for each in self._judges)
        return not is_busy and time.monotonic() - self._busy_at >= IDLE_SECONDS

    def _shut_down(self) -> None:
        for judge in self._judges:
            judge.line.close()
        self._judges.clear()
        self._affinity.clear()
        self._release_thread()
        self.fork_server.close()
