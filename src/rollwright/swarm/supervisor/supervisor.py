"""The supervisor of one node: start, watch, restart, give up.

Invariants: at most one process of the node runs at a time, and no process of an earlier life is left when the next one
starts; every exit is in both logs and in `supervisor.json` with its cause; a stop request reaches the node first, which
then has `stop_seconds` to write its checkpoint. The supervisor knows the node only by its heartbeat. It needs a process of
its own, because it adopts and kills the node's orphans.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec

from rollwright.swarm.heartbeat import Heartbeat, NodePhase, read_heartbeat
from rollwright.swarm.supervisor.logs import NodeLogs
from rollwright.swarm.supervisor.processes import ProcessTree, adopt_orphans, kill_life, memory_kills
from rollwright.swarm.supervisor.record import (
    Restarted,
    SupervisorRecord,
    SupervisorState,
    hold,
    read_record,
    write_record,
)
from rollwright.swarm.supervisor.rules import (
    ExitCause,
    ProcessExit,
    Restart,
    RestartHistory,
    RestartRules,
    Seen,
    Stop,
    Watch,
    WatchRules,
    classify_exit,
    decide,
)

LOGS = "logs"
"""Folder of the logs, in the node's home."""

LOOK_SECONDS = 0.5
"""Between two observations: soon enough that an exit costs little, seldom enough that watching costs nothing."""

REMEMBERED = 50
"""Exits listed in `supervisor.json`."""

STOP_SECONDS = 60.0
"""For a node to finish its work and write a checkpoint."""

_LAST_OUTPUT_SECONDS = 2.0
"""For the last lines of a process that has exited to arrive."""


@dataclass(frozen=True)
class Supervision:
    """What to supervise, and how."""

    command: Sequence[str]
    home: Path
    """The node's folder: its heartbeat is read there, logs and `supervisor.json` are written there."""
    oom_fallbacks: Sequence[Sequence[str]] = ()
    """Arguments added to the command after the first, second, … out-of-memory exit; each replaces the one before."""
    restarts: RestartRules = field(default_factory=RestartRules)
    watching: WatchRules = field(default_factory=WatchRules)
    stop_seconds: float = STOP_SECONDS
    look_seconds: float = LOOK_SECONDS
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    count_memory_kills: Callable[[], int | None] = memory_kills
    """Counts the kernel's OOM kills. The kernel counts those of the whole machine: if another process is killed for want of
    memory at the same time, a node that was killed by a person is taken for one that was, too."""


class Supervisor:
    def __init__(self, supervision: Supervision, logs: NodeLogs | None = None) -> None:
        self._what = supervision
        self._logs = logs or NodeLogs(supervision.home / LOGS)
        self._history = RestartHistory()
        self._told: int | None = None
        """The signal that requested the stop."""
        self._impatient = False
        """Whether the stop was requested twice: the node is not waited for."""
        self._wake = threading.Event()
        self._last_words = ""
        self._pid = 0
        """Process id of the last start."""
        self._rounds = self._rounds_done()
        """Most rounds that a heartbeat has shown: a starting node may not know them yet."""
        self._record = SupervisorRecord(
            pid=os.getpid(),
            state=SupervisorState.WAITING,
            started=time.time(),
            command=list(supervision.command),
            node_pid=None,
            life=None,
            starts=0,
            endings={},
            last=[],
            oom_fallbacks=[],
            reason="starting",
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop the node, then the supervisor; the second call does not wait for the node."""
        self._impatient = self._told is not None
        self._told = self._told or number
        self._wake.set()

    def run(self) -> int:
        """Run until the node has ended for good; return the exit code."""
        with hold(self._what.home):
            self._kill_leftovers()
            adopt_orphans()
            before = {each: signal.signal(each, self._on_signal) for each in (signal.SIGTERM, signal.SIGINT)}
            try:
                return self._run_until_done()
            finally:
                for each, handler in before.items():
                    signal.signal(each, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop(number)

    def _kill_leftovers(self) -> None:
        """Kill processes of a supervisor that was killed: they would hold the node's identity and ports."""
        earlier = read_record(self._what.home)
        if earlier is not None and earlier.life is not None and (ended := kill_life(earlier.life)):
            self._logs.write_event(
                "leftovers", f"ended {ended} processes of an earlier supervisor's node", processes=ended
            )

    def _run_until_done(self) -> int:
        while True:
            life = self._run_once()
            if self._told is not None and life.ending is not ExitCause.DONE:
                self._record_exit(life)
                return self._end_as_told()
            smaller = self._fallback()
            self._history, decision = decide(
                self._history,
                life,
                time.monotonic(),
                self._what.restarts,
                oom_fallbacks=len(self._what.oom_fallbacks),
            )
            match decision:
                case Stop(code, reason, line):
                    self._record_exit(life)
                    return self._end(code, reason, line)
                case Restart(delay, reason):
                    less = "" if self._fallback() == smaller else f" with {' '.join(self._fallback())}"
                    self._record_exit(life, f"; next start in {delay:g} s{less}", delay=delay)
                    if self._wait(delay, reason):
                        return self._end_as_told()

    def _run_once(self) -> ProcessExit:
        """Run one process of the node to its end, and leave none of its descendants behind."""
        words = [*self._what.command, *self._fallback()]
        kills_before = self._what.count_memory_kills()
        began = time.monotonic()
        self._last_words = ""
        tree = ProcessTree(words, self._what.environment)
        self._pid = tree.pid
        number = self._record.starts
        restart = f" (restart {number})" if number else ""
        self._logs.write_event(
            "start", f"started process {tree.pid}{restart}: {' '.join(words)}", pid=tree.pid
        )
        listening = threading.Thread(target=self._listen, args=(tree,), daemon=True)
        listening.start()  # after the start event, so that the node's output follows it in the log
        self._update_record(
            state=SupervisorState.RUNNING,
            node_pid=tree.pid,
            life=tree.life,
            starts=number + 1,
            oom_fallbacks=list(self._fallback()),
            reason="the node runs",
            next_start=None,
        )
        try:
            judged = self._watch(tree, began)
        finally:
            code = tree.process.poll()
            orphans = tree.kill()
            listening.join(_LAST_OUTPUT_SECONDS)
        if code is not None and orphans:
            self._logs.write_event(
                "orphans", f"ended {orphans} processes that the node left behind", processes=orphans
            )
        rounds = max(0, self._rounds_done() - self._rounds)
        self._rounds += rounds
        if judged is None:
            kills = self._what.count_memory_kills()
            by_kernel = kills is None or kills_before is None or kills > kills_before
            judged = classify_exit(tree.process.returncode, rounds, killed_for_memory=by_kernel)
            code = tree.process.returncode
        return ProcessExit(judged, code, time.monotonic() - began, rounds, self._last_words)

    def _watch(self, tree: ProcessTree, began: float) -> ExitCause | None:
        """Watch until the process exits (`None`) or must be killed (the cause)."""
        watch = Watch(self._what.watching, began)
        while tree.process.poll() is None:
            if self._told is not None:
                return self._stop_node(tree)
            beat = self._heartbeat(tree)
            seen = Seen(
                time.monotonic(),
                None if beat is None else beat.beat,
                tree.suspended,
                starting=beat is not None and beat.phase is NodePhase.START,
            )
            if (judged := watch.look(seen)) is not None:
                return judged
            tree.reap()
            self._wake.wait(self._what.look_seconds)
        return None

    def _stop_node(self, tree: ProcessTree) -> ExitCause | None:
        """Ask the node to stop, and wait for it."""
        self._logs.write_event("stop", f"asked process {tree.pid} to stop", pid=tree.pid)
        tree.terminate()
        deadline = time.monotonic() + self._what.stop_seconds
        while tree.process.poll() is None:
            self._wake.clear()
            if self._impatient or time.monotonic() > deadline:
                self._logs.write_event("kill", f"process {tree.pid} did not stop in time; it is killed")
                break
            self._wake.wait(self._what.look_seconds)
        return ExitCause.ASKED

    def _wait(self, delay: float, reason: str) -> bool:
        """Wait before a restart; return whether a stop was requested meanwhile."""
        self._update_record(
            state=SupervisorState.WAITING,
            node_pid=None,
            life=None,
            reason=reason,
            next_start=time.time() + delay,
        )
        until = time.monotonic() + delay
        while self._told is None and (left := until - time.monotonic()) > 0:
            self._wake.wait(min(left, self._what.look_seconds))
        return self._told is not None

    def _listen(self, tree: ProcessTree) -> None:
        assert tree.process.stdout is not None
        for line in tree.process.stdout:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_words = text[:500]
                self._logs.write_output(text)

    def _heartbeat(self, tree: ProcessTree) -> Heartbeat | None:
        """The heartbeat of this process; one that an earlier process has left does not count."""
        found = read_heartbeat(self._what.home)
        return found if found is not None and found.pid == tree.pid else None

    def _rounds_done(self) -> int:
        found = read_heartbeat(self._what.home)
        return 0 if found is None else found.rounds_done

    def _fallback(self) -> Sequence[str]:
        taken = self._history.oom_fallbacks
        return self._what.oom_fallbacks[taken - 1] if taken else ()

    def _record_exit(self, life: ProcessExit, follows: str = "", **details: object) -> None:
        """Log and record an exit, in one line with what follows it."""
        ending = str(life.ending)
        self._logs.write_event(
            "end",
            f"process {self._pid} {life}{follows}",
            pid=self._pid,
            ending=ending,
            code=life.code,
            seconds=round(life.seconds, 1),
            rounds=life.rounds,
            **details,
        )
        self._update_record(
            node_pid=None,
            life=None,
            endings={**self._record.endings, ending: self._record.endings.get(ending, 0) + 1},
            last=[*self._record.last, Restarted(time.time(), ending, f"the node {life}")][-REMEMBERED:],
        )

    def _end_as_told(self) -> int:
        number = signal.Signals(self._told or signal.SIGTERM)
        why = f"asked to stop by {number.name}"
        return self._end(128 + number, why, why)

    def _end(self, code: int, reason: str, line: str) -> int:
        self._logs.write_event(
            "give_up" if code == 1 else "ended", f"the supervisor ends with code {code}: {line}", code=code
        )
        self._update_record(
            state=SupervisorState.ENDED, node_pid=None, life=None, reason=reason, next_start=None
        )
        return code

    def _update_record(self, **changed: object) -> None:
        self._record = msgspec.structs.replace(self._record, **changed)
        write_record(self._what.home, self._record)
