"""What follows when a supervised process has ended: plain state in, a decision out.

True of it: a process that gets rounds done is started again however often it dies, up to a number in each hour; one
that dies several times in a row without finishing a round is given up, and so is one that refuses its settings, because
neither gets better by repetition. The waits between starts grow and begin anew after a finished round. Death for want
of memory asks for less before it counts as a crash.
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


class Ending(StrEnum):
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
class Life:
    """One process from its start to its end."""

    ending: Ending
    code: int | None
    """As `subprocess` has it: negative for a signal. `None` when the supervisor ended it."""
    seconds: float
    rounds: int
    """Finished in it."""
    last_words: str = ""
    """The last line that it wrote."""

    def __str__(self) -> str:
        how = {
            Ending.HUNG: "made no progress and was killed",
            Ending.STOPPED: "was suspended and killed",
            Ending.OUT_OF_MEMORY: "was killed for want of memory",
        }.get(self.ending, _how(self.code))
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        # Only who ends by itself with an error says why in its last line.
        is_why = self.ending in (Ending.CRASHED, Ending.REFUSED) and (self.code or 0) > 0
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
class History:
    """What is remembered from life to life."""

    fruitless: int = 0
    """Lives in a row that finished no round."""
    concessions: int = 0
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


def ending_of(code: int, rounds: int, *, killed_for_memory: bool) -> Ending:
    """Of a process that ended by itself. `killed_for_memory` is what the kernel's counters say of a SIGKILL."""
    if code == 0:
        return Ending.DONE
    if code == KILLED or (code == -9 and killed_for_memory):
        return Ending.OUT_OF_MEMORY
    if code == USER_ERROR and rounds == 0:
        return Ending.REFUSED
    return Ending.CRASHED


def decide(
    history: History, life: Life, now: float, rules: RestartRules, *, concessions: int
) -> tuple[History, Restart | Stop]:
    """What to do now, and what to remember. `concessions`: how often the process can be made smaller in all."""
    if life.ending in (Ending.DONE, Ending.ASKED):
        why = "the node ended by itself" if life.ending is Ending.DONE else "asked to stop"
        return history, Stop(0, why, why)
    if life.ending is Ending.REFUSED:
        why = "the node refused to start, and would again"
        return history, Stop(USER_ERROR, f"{why}: {life.last_words}", why)
    starts = tuple(each for each in history.starts if now - each < HOUR)
    fruitless = 0 if life.rounds else history.fruitless + 1
    remembered = replace(history, fruitless=fruitless, starts=(*starts, now))
    if life.ending is Ending.OUT_OF_MEMORY and history.concessions < concessions:
        # asking for less is a new try, not one more of the same
        smaller = replace(remembered, concessions=history.concessions + 1, fruitless=0)
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
