"""When a supervised process counts as hung, and what follows when it has exited. Pure: observations in, decisions out.

Invariants:
- A process that finishes rounds is restarted however often it dies, up to `max_per_hour`. One that dies several times in
  a row without finishing a round is given up, and so is one that refuses its settings: repetition helps neither.
- The delay between restarts grows exponentially and starts over after a finished round.
- A process killed for lack of memory is restarted with smaller settings before this counts as a crash.
- A process is judged by its progress, not by being alive, and only by the watcher's own monotonic clock: the node's
  clock may be wrong. A watcher that was itself suspended starts counting anew, because it saw nothing meanwhile.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from signal import Signals

USER_ERROR = 2
"""Exit code of the command line for bad input."""

KILLED = 137
"""Exit code that shells and containers report for SIGKILL, which is the OOM killer's signal."""

GAVE_UP = 1
"""Exit code of a supervisor that has given up."""

HOUR = 3600.0


class ExitCause(StrEnum):
    """Why a process exited."""

    DONE = "done"
    """By itself, with exit code 0."""
    ASKED = "asked"
    """The supervisor was told to stop."""
    CRASHED = "crashed"
    """Another exit code, or a signal."""
    REFUSED = "refused"
    """It refused its settings before it did anything."""
    OUT_OF_MEMORY = "out_of_memory"
    """Killed by the kernel's OOM killer, or exit code 137."""
    HUNG = "hung"
    """No progress; the supervisor killed it."""
    STOPPED = "stopped"
    """Suspended (SIGSTOP) and not continued; the supervisor killed it."""


@dataclass(frozen=True)
class ProcessExit:
    """The end of one process."""

    ending: ExitCause
    code: int | None
    """The return code of `subprocess`: negative for a signal. `None` if the supervisor killed it."""
    seconds: float
    rounds: int
    """Rounds finished by the process."""
    last_words: str = ""
    """The last line of its output."""

    def __str__(self) -> str:
        how = {
            ExitCause.HUNG: "made no progress and was killed",
            ExitCause.STOPPED: "was suspended and killed",
            ExitCause.OUT_OF_MEMORY: "was killed for want of memory",
        }.get(self.ending, _describe(self.code))
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        # The last line is an error message only if the process exited by itself with an error.
        is_why = self.ending in (ExitCause.CRASHED, ExitCause.REFUSED) and (self.code or 0) > 0
        said = f': "{self.last_words}"' if is_why and self.last_words else ""
        return f"{how} after {self.seconds:.0f} s and {rounds}{said}"


@dataclass(frozen=True)
class RestartRules:
    """When and how soon a process is restarted."""

    first_delay: float = 1.0
    """Seconds before the first restart."""
    factor: float = 2.0
    """Growth of the delay with each further exit without a finished round."""
    max_delay: float = 300.0
    """Longest delay: a machine that recovers is not left idle for long."""
    max_fruitless: int = 5
    """Exits in a row without a finished round before giving up."""
    max_per_hour: int = 20
    """Restarts in an hour before giving up, even if rounds are finished: something is badly wrong."""


@dataclass(frozen=True)
class RestartHistory:
    """The state between two processes."""

    fruitless: int = 0
    """Exits in a row without a finished round."""
    oom_fallbacks: int = 0
    """Fallbacks used so far."""
    starts: tuple[float, ...] = ()
    """Times of the restarts in the last hour."""


@dataclass(frozen=True)
class Restart:
    delay: float
    """Seconds to wait before it."""
    reason: str


@dataclass(frozen=True)
class Stop:
    code: int
    """The supervisor's exit code."""
    reason: str
    """With the last exit in it, for `supervisor.json`."""
    line: str
    """For the log, where the last exit stands on the line before."""


def classify_exit(code: int, rounds: int, *, killed_for_memory: bool) -> ExitCause:
    """Classify an exit. `killed_for_memory`: whether the kernel's counters attribute a SIGKILL to the OOM killer."""
    if code == 0:
        return ExitCause.DONE
    if code == KILLED or (code == -9 and killed_for_memory):
        return ExitCause.OUT_OF_MEMORY
    if code == USER_ERROR and rounds == 0:
        return ExitCause.REFUSED
    return ExitCause.CRASHED


def decide(
    history: RestartHistory, last: ProcessExit, now: float, rules: RestartRules, *, oom_fallbacks: int
) -> tuple[RestartHistory, Restart | Stop]:
    """Decide what follows an exit; return the new history and the decision. `oom_fallbacks`: the number of fallbacks that
    exist."""
    if last.ending in (ExitCause.DONE, ExitCause.ASKED):
        why = "the node ended by itself" if last.ending is ExitCause.DONE else "asked to stop"
        return history, Stop(0, why, why)
    if last.ending is ExitCause.REFUSED:
        why = "the node refused to start, and would again"
        return history, Stop(USER_ERROR, f"{why}: {last.last_words}", why)
    starts = tuple(each for each in history.starts if now - each < HOUR)
    fruitless = 0 if last.rounds else history.fruitless + 1
    remembered = replace(history, fruitless=fruitless, starts=(*starts, now))
    if last.ending is ExitCause.OUT_OF_MEMORY and history.oom_fallbacks < oom_fallbacks:
        # smaller settings are a new try, not a repetition
        smaller = replace(remembered, oom_fallbacks=history.oom_fallbacks + 1, fruitless=0)
        return smaller, Restart(rules.first_delay, f"the node {last}; it is started again with less")
    if fruitless >= rules.max_fruitless:
        why = f"{fruitless} times in a row no round was finished"
    elif len(remembered.starts) > rules.max_per_hour:
        why = f"more than {rules.max_per_hour} restarts in an hour"
    else:
        why = ""
    if why:
        return remembered, Stop(GAVE_UP, f"{why}; the last time the node {last}", f"giving up: {why}")
    delay = min(rules.max_delay, rules.first_delay * rules.factor ** max(0, fruitless - 1))
    return remembered, Restart(delay, f"the node {last}")


def _describe(code: int | None) -> str:
    if code is None:
        return "was killed"
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {Signals(-code).name}"
    except ValueError:  # one of the nameless ones
        return f"was killed by signal {-code}"


@dataclass(frozen=True)
class WatchRules:
    """When a process counts as hung."""

    hang_seconds: float = 900.0
    """Seconds without progress. Longer than the slowest operation of a round, a training step of a large batch."""
    start_seconds: float = 3600.0
    """Seconds without progress during the start: a model may have to be downloaded."""
    stopped_seconds: float = 60.0
    """Seconds of suspension: long enough to attach a debugger and detach again."""
    blind_seconds: float = 30.0
    """Seconds between two observations. After a longer gap the watcher itself was not running, and starts anew."""


@dataclass(frozen=True)
class Seen:
    """One observation of the process."""

    at: float
    """Time on the watcher's monotonic clock."""
    beat: int | None
    """The count of its heartbeat; `None` before the first."""
    suspended: bool
    """Whether the kernel shows it as stopped."""
    starting: bool = False
    """Whether its heartbeat shows that it is still loading and joining."""


class Watch:
    """Watches one process."""

    def __init__(self, rules: WatchRules, started: float) -> None:
        self._rules = rules
        self._beat: int | None = None
        self._moved = started
        self._looked = started
        self._suspended_since: float | None = None

    def look(self, seen: Seen) -> ExitCause | None:
        """Return the reason to kill the process, or `None`."""
        rules = self._rules
        if seen.at - self._looked > rules.blind_seconds:
            self._moved = seen.at
            self._suspended_since = None
        self._looked = seen.at
        if seen.beat != self._beat:
            self._beat, self._moved = seen.beat, seen.at
        if not seen.suspended:
            self._suspended_since = None
        elif self._suspended_since is None:
            self._suspended_since = seen.at
        if self._suspended_since is not None and seen.at - self._suspended_since >= rules.stopped_seconds:
            return ExitCause.STOPPED
        patience = rules.start_seconds if seen.beat is None or seen.starting else rules.hang_seconds
        return ExitCause.HUNG if seen.at - self._moved >= patience else None
