"""The judges of a scoring service, and whose turn it is with which.

True of it: a judge has at most a few requests, in order, and the first of them is the one it works on; a judge that is
late, dead or talks nonsense is gone at once; the pool ends after a while without requests, which gives its memory back.
Everything here happens under one lock; the thread holds it only while it looks at what has come.
"""

import itertools
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.scoring.judge_line import QUESTION_SECONDS, JudgeLine, JudgeWord, PendingRequest
from rollwright.envs.scoring.protocol import (
    JudgeAsk,
    JudgeReply,
    JudgeRequest,
    MakingQuestion,
    NoQuestion,
    QuestionStands,
    Result,
    Score,
)
from rollwright.sandbox.client import ForkServer, SandboxError
from rollwright.sandbox.protocol import Ready, SandboxLimits, frame

UNCONFINED_VARIABLE = "ROLLWRIGHT_UNCONFINED_SCORING"
"""Environment variable: 1 lets judges run with limits only where the machine cannot give a sandbox. Also then nothing runs
as root."""

IDLE_SECONDS = 120.0
"""After so long without a request the judges end, which gives about 150 MB back."""

START_SECONDS = 120.0
"""For the first judge, whose process has to import reasoning-gym (about 3 s on an idle machine)."""

MAX_JUDGES = max(2, os.cpu_count() or 1)
"""Scoring is computing: more at once than there are processors would only take time from each other."""

_DEPTH = 2
"""Requests that a judge has at a time: the next lies ready when one is done."""

_MAX_DEATHS = 2
"""Judges that may die over a request, or one after the other before they are ready."""

_CPU_SECONDS = 3_600
"""Of a judge's whole life, which ends after some thousand answers; each answer's time is kept from here."""

_TICK_SECONDS = 0.2
"""How often the time is looked at while there is something to do."""

_MAX_LOOK = 32
"""Requests at the front that are looked through for one whose question a judge has."""

_MAX_HOMES = 4_096
"""Questions of which it is remembered which judge has them."""

_log = logging.getLogger(__name__)


class JudgePool:
    """Hands requests to judges and their replies back; any thread may submit."""

    def __init__(self, memory: int, *, allow_unconfined: bool = False) -> None:
        self._limits = SandboxLimits(cpu_seconds=_CPU_SECONDS, memory=memory, disk=1 << 20, threads=1)
        self._allow_unconfined = allow_unconfined
        self._is_confined = True
        self.starter = ForkServer("rollwright.envs.scoring.judge", _package_folders())
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake: socket.socket | None = None
        self._sleeps_until = 0.0
        self._busy_at = 0.0
        self._failed_starts = 0
        self._dead_maker = 0
        self._waiting: deque[PendingRequest] = deque()
        self._judges: list[JudgeLine] = []
        self._homes: OrderedDict[tuple[str, int], JudgeLine] = OrderedDict()
        self._done: list[tuple[PendingRequest, Result | EnvironmentFailure]] = []

    def submit(self, request: JudgeRequest) -> "Future[Result]":
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
        """Ends all judges; what was asked of them fails. A later request starts new ones."""
        with self._lock:
            thread = self._thread
            for judge in self._judges:
                self._waiting.extend(judge.queue)
                judge.line.close()
            self._judges.clear()
            self._homes.clear()
            for pending in self._waiting:
                self._done.append((pending, EnvironmentFailure("the scoring process was closed")))
            self._waiting.clear()
            self._let_thread_go()
            self.starter.close()
        self._settle()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """In a forked copy of this process: lets go of the judges, which belong to the original."""
        self._lock = threading.Lock()
        for judge in self._judges:
            judge.line.close()
        if self._wake is not None:
            self._wake.close()
        self._judges, self._thread, self._wake = [], None, None
        self.starter.abandon()

    # Everything from here on is called with the lock held, but for `_run` and `_settle`.

    def _dispatch(self) -> None:
        """Gives judges what waits, as far as they have room. A judge with nothing to do takes anything; one that is busy
        takes what is best judged there, once no more judges may be started."""
        depth = 1 if len(self._judges) < MAX_JUDGES else _DEPTH
        while self._waiting:
            free = sorted((each for each in self._judges if each.is_ready), key=lambda each: len(each.queue))
            found = next(
                (
                    (judge, pending)
                    for judge in free
                    if len(judge.queue) < depth and (pending := self._fitting(judge)) is not None
                ),
                None,
            )
            if found is None:
                return
            self._hand_over(*found)

    def _fitting(self, judge: JudgeLine) -> PendingRequest | None:
        """The first request, of those at the front, whose question this judge has or nobody has."""
        for pending in itertools.islice(self._waiting, _MAX_LOOK):
            home = self._homes.get(pending.place)
            if home is judge or home not in self._judges:
                return pending
        return None if judge.queue else self._waiting[0]

    def _hand_over(self, judge: JudgeLine, pending: PendingRequest) -> None:
        self._waiting.remove(pending)
        if pending.outcome.cancelled():
            return  # nobody waits for it any more
        judge.queue.append(pending)
        if len(judge.queue) == 1:
            judge.begin_next(time.monotonic())
        self._homes[pending.place] = judge
        self._homes.move_to_end(pending.place)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        judge.send(frame(pending.request))

    def _needs_thread(self) -> bool:
        """Whether the thread has to do something before a judge says anything."""
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

    def _let_thread_go(self) -> None:
        self._wake_thread()
        if self._wake is not None:
            self._wake.close()
        self._thread = self._wake = None

    def _run(self, woken: socket.socket) -> None:
        """The thread's whole life."""
        try:
            self._serve(woken)
        except BaseException:
            _log.exception("the thread that keeps the judges ended")
            self.close()  # nobody waits for ever
            raise

    def _serve(self, woken: socket.socket) -> None:
        """Until the pool is closed or was idle for long."""
        with woken, selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            watched: dict[JudgeLine, int] = {}
            while True:
                with self._lock:
                    if self._thread is not threading.current_thread():
                        return
                    self._start_judges()
                    self._watch(selector, watched)
                    now = time.monotonic()
                    timeout = self._timeout(now)
                    self._sleeps_until = now + timeout
                    has_news = bool(self._done)
                if has_news:
                    self._settle()
                events = selector.select(timeout)
                with self._lock:
                    if self._thread is not threading.current_thread():
                        return
                    for key, _ in events:
                        if isinstance(key.data, JudgeLine):
                            self._hear(key.data)
                        else:
                            with suppress(BlockingIOError):
                                woken.recv(1 << 12)
                    self._end_late(time.monotonic())
                    self._dispatch()
                    if self._is_idle():
                        self._rest()
                        return
                self._settle()

    def _settle(self) -> None:
        """Outcomes are set without the lock: whoever waits for one may ask again at once."""
        with self._lock:
            done, self._done = self._done, []
        for pending, result in done:
            if not pending.outcome.set_running_or_notify_cancel():
                continue  # given up meanwhile
            if isinstance(result, EnvironmentFailure):
                pending.outcome.set_exception(result)
            else:
                pending.outcome.set_result(result)

    def _watch(self, selector: selectors.BaseSelector, watched: dict[JudgeLine, int]) -> None:
        """Listens to the judges that there are, and for room where something is left to send."""
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
        """One for each request that waits, up to the most."""
        starting = sum(not each.is_ready for each in self._judges)
        while len(self._judges) < MAX_JUDGES and starting < len(self._waiting):
            try:
                line = self.starter.start(self._limits, is_confined=self._is_confined)
            except SandboxError as error:
                self._give_up(str(error))
                return
            maker = self.starter.process.pid if self.starter.process is not None else 0
            self._judges.append(JudgeLine(line, maker, time.monotonic() + START_SECONDS))
            starting += 1

    def _hear(self, judge: JudgeLine) -> None:
        judge.send()
        for word in judge.receive() if judge in self._judges else ():
            self._heed(judge, word)
            if judge not in self._judges:
                return
        if judge.has_ended and judge in self._judges:
            self._bury(judge, is_own_death=False)

    def _heed(self, judge: JudgeLine, word: JudgeWord) -> None:
        now = time.monotonic()
        match word:
            case Ready():
                self._greet(judge, word)
            case MakingQuestion():
                judge.is_making, judge.deadline = True, now + QUESTION_SECONDS
            case QuestionStands():
                judge.begin_next(now)
            case JudgeReply() if judge.queue and judge.queue[0].request.id == word.id:
                self._take(judge, word)
            case _:  # its end, or a reply to nothing that it was asked
                self._bury(judge, is_own_death=True)

    def _take(self, judge: JudgeLine, judged: JudgeReply) -> None:
        self._done.append((judge.queue.popleft(), judged.result))
        self._busy_at = time.monotonic()
        judge.begin_next(self._busy_at)
        if judged.is_last:
            self._drop(judge)

    def _greet(self, judge: JudgeLine, ready: Ready) -> None:
        if not ready.missing:
            judge.is_ready = True
            self._failed_starts = 0
            return
        self._drop(judge)
        if self._is_confined and self._allow_unconfined:
            _log.warning("answers are judged with limits only; missing is %s", ready.missing)
            self._is_confined = False
            return
        hint = (
            "" if self._allow_unconfined else f"; {UNCONFINED_VARIABLE}=1 would judge them with limits only"
        )
        self._give_up(
            f"answers to reasoning_gym cannot be judged on this machine; missing is {ready.missing}{hint}"
        )

    def _give_up(self, problem: str) -> None:
        for pending in self._waiting:
            self._done.append((pending, EnvironmentFailure(problem)))
        self._waiting.clear()

    def _end_late(self, now: float) -> None:
        for judge in [each for each in self._judges if each.deadline <= now]:
            if not judge.is_ready:
                self._drop(judge)
                self._give_up(f"no judge was ready in {START_SECONDS:g} s")
            elif judge.queue:
                self._fail_first(judge)
                self._drop(judge)

    def _bury(self, judge: JudgeLine, *, is_own_death: bool) -> None:
        """After a judge has died. `is_own_death`: its process ended; otherwise that of all judges did."""
        if judge.queue:
            first = judge.queue[0]
            first.deaths += 1
            if first.deaths >= _MAX_DEATHS:
                if is_own_death:
                    self._fail_first(judge)
                else:
                    failure = EnvironmentFailure(f"{first.deaths} scoring processes died over a request")
                    self._done.append((judge.queue.popleft(), failure))
        elif not judge.is_ready:
            if is_own_death or judge.maker != self._dead_maker:  # those that start together may end together
                self._failed_starts += 1
            self._dead_maker = judge.maker
            if self._failed_starts >= _MAX_DEATHS:
                self._failed_starts = 0
                self._give_up("a judge ended before it was ready")
        self._drop(judge)

    def _fail_first(self, judge: JudgeLine) -> None:
        first = judge.queue.popleft()
        if first.request.ask is JudgeAsk.SCORE and not judge.is_making:
            self._done.append((first, Score(0.0, killed=True)))
        else:
            message = f"{first.request.dataset}: making the question failed or took too long"
            self._done.append((first, NoQuestion(message, False)))

    def _drop(self, judge: JudgeLine) -> None:
        """Its requests go to others, in their order."""
        self._judges.remove(judge)
        with suppress(OSError):
            judge.line.shutdown(socket.SHUT_RDWR)
        for pending in reversed(judge.queue):
            self._waiting.appendleft(pending)
        judge.queue.clear()

    def _is_idle(self) -> bool:
        is_busy = bool(self._waiting) or any(each.queue for each in self._judges)
        return not is_busy and time.monotonic() - self._busy_at >= IDLE_SECONDS

    def _rest(self) -> None:
        for judge in self._judges:
            judge.line.close()
        self._judges.clear()
        self._homes.clear()
        self._let_thread_go()
        self.starter.close()


def _package_folders() -> list[Path]:
    """Where reasoning-gym and what it needs are installed."""
    places = [Path(each) for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    spec = find_spec("reasoning_gym")
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent.parent)
    return [each for each in dict.fromkeys(places) if each.is_dir()]
