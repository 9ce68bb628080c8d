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
"""With this code the command line refuses what it was given."""

KILLED = 137
"""What shells and containers report for a process that was killed, which the kernel does for want of memory."""

GAVE_UP = 1
"""The supervisor's own code when it does not start the process again."""

HOUR = 3600.0


class ExitCause(StrEnum):
    """How a life ended."""

    DONE = "done"
    """By itself, with code 0."""
    ASKED = "asked"
    """Because the supervisor was told to stop."""
    CRASHED = "crashed"
    """With another code, or by a signal."""
    REFUSED = "refused"
    """It would not have its settings, and said so before it did anything."""
    OUT_OF_MEMORY = "out_of_memory"
    """Killed by the kernel, or code 137."""
    HUNG = "hung"
    """It lived, but nothing moved; the supervisor ended it."""
    STOPPED = "stopped"
    """It was suspended (SIGSTOP) and not continued; the supervisor ended it."""


@dataclass(frozen=True)
class ProcessExit:
    """One process from its start to its end."""

    ending: ExitCause
    code: int | None
    """As `subprocess` has it: negative for a signal. `None` when the supervisor ended it."""
    seconds: float
    rounds: int
    """Finished in it."""
    last_words: str = ""
    """The last line that it wrote."""

    def __str__(self) -> str:
        how = {
            ExitCause.HUNG: "made no progress and was killed",
            ExitCause.STOPPED: "was suspended and killed",
            ExitCause.OUT_OF_MEMORY: "was killed for want of memory",
        }.get(self.ending, _how(self.code))
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        # Only who ends by itself with an error says why in its last line.
        is_why = self.ending in (ExitCause.CRASHED, ExitCause.REFUSED) and (self.code or 0) > 0
        said = f': "{self.last_words}"' if is_why and self.last_words else ""
        return f"{how} after {self.seconds:.0f} s and {rounds}{said}"


@dataclass(frozen=True)
class RestartRules:
    """When and how soon a process is started again."""

    first_delay: float = 1.0
    """Seconds before the first new start."""
    factor: float = 2.0
    """Each further death without a finished round makes the wait so many times longer."""
    max_delay: float = 300.0
    """Longest wait: a machine that comes back is not left alone for long."""
    max_fruitless: int = 5
    """Deaths in a row without a finished round after which it is given up."""
    max_per_hour: int = 20
    """Starts in an hour after which it is given up, though rounds get done: something is badly wrong."""


@dataclass(frozen=True)
class RestartHistory:
    """What is remembered from life to life."""

    fruitless: int = 0
    """Lives in a row that finished no round."""
    oom_fallbacks: int = 0
    """How often it was made smaller, so far."""
    starts: tuple[float, ...] = ()
    """When it was started again, in the last hour."""


@dataclass(frozen=True)
class Restart:
    delay: float
    """Seconds to wait first."""
    reason: str


@dataclass(frozen=True)
class Stop:
    code: int
    """For the supervisor to end with."""
    reason: str
    """With the last life in it, for whoever asks later."""
    line: str
    """For a log in which that life stands right before."""


def ending_of(code: int, rounds: int, *, killed_for_memory: bool) -> ExitCause:
    """Of a process that ended by itself. `killed_for_memory` is what the kernel's counters say of a SIGKILL."""
    if code == 0:
        return ExitCause.DONE
    if code == KILLED or (code == -9 and killed_for_memory):
        return ExitCause.OUT_OF_MEMORY
    if code == USER_ERROR and rounds == 0:
        return ExitCause.REFUSED
    return ExitCause.CRASHED


def decide(
    history: RestartHistory, life: ProcessExit, now: float, rules: RestartRules, *, oom_fallbacks: int
) -> tuple[RestartHistory, Restart | Stop]:
    """What to do now, and what to remember. `oom_fallbacks`: how often the process can be made smaller in all."""
    if life.ending in (ExitCause.DONE, ExitCause.ASKED):
        why = "the node ended by itself" if life.ending is ExitCause.DONE else "asked to stop"
        return history, Stop(0, why, why)
    if life.ending is ExitCause.REFUSED:
        why = "the node refused to start, and would again"
        return history, Stop(USER_ERROR, f"{why}: {life.last_words}", why)
    starts = tuple(each for each in history.starts if now - each < HOUR)
    fruitless = 0 if life.rounds else history.fruitless + 1
    remembered = replace(history, fruitless=fruitless, starts=(*starts, now))
    if life.ending is ExitCause.OUT_OF_MEMORY and history.oom_fallbacks < oom_fallbacks:
        # asking for less is a new try, not one more of the same
        smaller = replace(remembered, oom_fallbacks=history.oom_fallbacks + 1, fruitless=0)
        return smaller, Restart(rules.first_delay, f"the node {life}; it is started again with less")
    if fruitless >= rules.max_fruitless:
        why = f"{fruitless} times in a row no round was finished"
    elif len(remembered.starts) > rules.max_per_hour:
        why = f"more than {rules.max_per_hour} restarts in an hour"
    else:
        why = ""
    if why:
        return remembered, Stop(GAVE_UP, f"{why}; the last time the node {life}", f"giving up: {why}")
    delay = min(rules.max_delay, rules.first_delay * rules.factor ** max(0, fruitless - 1))
    return remembered, Restart(delay, f"the node {life}")


def _how(code: int | None) -> str:
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
    """How long is too long."""

    hang_seconds: float = 900.0
    """Without progress. Longer than the slowest single thing a round does: a training step of a large batch."""
    start_seconds: float = 3600.0
    """Without progress while it starts: a model may have to be downloaded first."""
    stopped_seconds: float = 60.0
    """Suspended: long enough for someone to look at it with a debugger, and to let go."""
    blind_seconds: float = 30.0
    """Between two looks. After a longer gap the watcher itself was not running, and judges nobody by it."""


@dataclass(frozen=True)
class Seen:
    """One look at the process."""

    at: float
    """By the watcher's monotonic clock."""
    beat: int | None
    """Of its heartbeat; `None`: it has not beaten yet."""
    suspended: bool
    """Whether the kernel says that it is stopped."""
    starting: bool = False
    """Whether it says that it is still loading and joining."""


class Watch:
    """Follows one life."""

    def __init__(self, rules: WatchRules, started: float) -> None:
        self._rules = rules
        self._beat: int | None = None
        self._moved = started
        self._looked = started
        self._suspended_since: float | None = None

    def look(self, seen: Seen) -> ExitCause | None:
        """`None`: leave it alone."""
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
