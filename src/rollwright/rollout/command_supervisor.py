"""Parent process of a command: starts it, and ends everything that came of it.

Always true: when this process ends, no descendant of the command is left, also none that left its session and process
group. On Linux, orphans become children of this process (a child subreaper), which kills until it has no child left;
elsewhere, only the command's process group is killed. This process ends when the command does, with the same exit code or
signal, or when its standard input ends, that is, when the worker that holds the other end is gone.

It is run as a script by its path and imports the standard library alone, so that it starts in milliseconds.
"""

import os
import signal
import sys
import threading
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From `linux/prctl.h`."""

NOT_FOUND = 127
"""Exit code of a command that cannot be started, as a shell has it."""


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(command: list[str]) -> int:
    """Starts the command in a session of its own; returns its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(NOT_FOUND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_FOUND)


def _descendants() -> list[int]:
    """Process ids of all descendants of this process, from `/proc`."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it has ended meanwhile
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    left = [os.getpid()]
    while left:
        own = children.get(left.pop(), [])
        found += own
        left += own
    return found


def _kill_all(command: int) -> None:
    """Kills until there is no child left. Killed processes hand their children to this one, hence the loop."""
    while True:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(command, signal.SIGKILL)
        if sys.platform != "linux":
            return
        for pid in _descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main(command: list[str]) -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = _start(command)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        _kill_all(pid)
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    ended, status = 0, 0
    while ended != pid:
        try:
            ended, status = os.waitpid(-1, 0)  # orphans are reaped here too
        except ChildProcessError:
            threading.Event().wait()  # the other thread has ended the command, and ends this process
    _kill_all(pid)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1:])
