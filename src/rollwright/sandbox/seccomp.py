"""Which system calls a locked-in process may make, as a program for the kernel's filter.

Whatever is not named here is refused with "operation not permitted"; that does not end the process. Known are Linux on
x86-64 and on ARM64.
"""

import platform
import struct
from dataclasses import dataclass
from functools import cache

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""The five instructions of the kernel's filter language that are needed here."""
_ALLOW, _REFUSE, _UNKNOWN, _PRETEND = 0x7FFF_0000, 0x0005_0001, 0x0005_0026, 0x0005_0000
"""Refusing gives the caller error 1, EPERM; a call that the kernel does not know gives 38, ENOSYS; pretending gives error
0, which is success, and does nothing."""
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
"""Where a system call's number, its architecture and its arguments of 8 bytes stand."""

_X32_CALLS = 0x4000_0000
"""x86-64 accepts a second numbering of the same calls from here on; it is refused as a whole."""

_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

_HARMLESS = """
    access 21 -, brk 12 214, clock_getres 229 114, clock_gettime 228 113, clock_nanosleep 230 115, close 3 57,
    dup 32 23, dup2 33 -, dup3 292 24, exit 60 93, exit_group 231 94, faccessat 269 48, faccessat2 439 439,
    fstat 5 80, futex 202 98, getcwd 79 17, getdents64 217 61, getegid 108 177, geteuid 107 175,
    getgid 104 176, getpid 39 172, getppid 110 173, getrandom 318 278, getrlimit 97 163, getrusage 98 165,
    gettid 186 178, gettimeofday 96 169, getuid 102 174, lseek 8 62, lstat 6 -, madvise 28 233,
    membarrier 324 283, mmap 9 222, mprotect 10 226, mremap 25 216, munmap 11 215, nanosleep 35 101,
    newfstatat 262 79, poll 7 -, ppoll 271 73, pread64 17 67, pselect6 270 72, read 0 63, readlink 89 -,
    readlinkat 267 78, readv 19 65, restart_syscall 219 128, rseq 334 293, rt_sigaction 13 134,
    rt_sigprocmask 14 135, rt_sigreturn 15 139, sched_getaffinity 204 123, sched_yield 24 124, select 23 -,
    set_robust_list 273 99, sigaltstack 131 132, stat 4 -, statx 332 291, sysinfo 99 179, time 201 -,
    uname 63 160, write 1 64, writev 20 66
"""
"""The calls that need no look at their arguments, with their numbers on x86-64 and on ARM64."""

_OWN_FILES = """
    open 2 -, openat 257 56, chdir 80 49, chmod 90 -, close_range 436 436, copy_file_range 326 285, creat 85 -,
    fallocate 285 47, fchdir 81 50, fchmod 91 52, fchmodat 268 53, fdatasync 75 83, flock 73 32,
    fstatfs 138 44, fsync 74 82, ftruncate 77 46, getdents 78 -, link 86 -, linkat 265 37, mkdir 83 -,
    mkdirat 258 34, pwrite64 18 68, pwritev 296 70, preadv 295 69, rename 82 -, renameat 264 38, renameat2 316 276,
    rmdir 84 -, sendfile 40 71, statfs 137 43, symlink 88 -, symlinkat 266 36, truncate 76 45, umask 95 166,
    unlink 87 -, unlinkat 263 35, utimensat 280 88
"""
"""Files, for a process that sees none but its own and those it may read."""

_OWN_WAITING = """
    epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_wait 232 -, eventfd2 290 19, pipe 22 -,
    pipe2 293 59, recvfrom 45 207, rt_sigpending 127 136, rt_sigtimedwait 128 137, sendto 44 206, setitimer 38 103,
    shutdown 48 210, getsockopt 55 209, getsockname 51 204, getpeername 52 205,
    sched_getparam 143 121, sched_getscheduler 145 120, getpgrp 111 -, getpgid 121 155, getgroups 115 158
"""
"""What threads and event loops of one process need. `socket` is not among them, and `setsockopt` neither: what lies in a
buffer of the kernel is outside the limit of memory, so no buffer may be made larger."""

_AF_UNIX = 1
_FCNTL = (0, 1, 2, 3, 4, 5, 1030, 1032)
"""Of what `fcntl` can do: copies of an open file, its flags, asking for locks and for the size of a pipe. Not among them:
making a pipe larger, signals, leases, notices of changes."""
_FCNTL_LOCKS = (6, 7)
"""Setting a lock on a part of a file. They are said to be set and are not: all files are this one process's own, so that
no lock of this kind could ever be in its way, and each real one would take memory of the kernel."""

_CLONE_THREAD = 0x0001_0000
_ON_OWN_FILES = (0x5421, 0x5450, 0x5451)
"""Of all requests to devices those about the open file itself: whether it blocks, and whether a new program gets it."""


@dataclass(frozen=True)
class Check:
    """A call that is let through or not by one of its arguments."""

    call: str
    """Name and numbers."""
    argument: int
    test: int
    values: tuple[int, ...]
    passes: bool
    """Whether it is let through when the test is true of one of the values; otherwise it is when it is of none."""
    pretended: tuple[int, ...] = ()
    """Values for which the call seems to have worked."""


@dataclass(frozen=True)
class Rules:
    """What a process may call."""

    calls: str
    checks: tuple[Check, ...]
    unknown: tuple[str, ...] = ()
    """Calls that seem not to exist, so that their older forms are used, which can be checked."""


COMPUTING = Rules(
    f"{_HARMLESS}, {_OWN_FILES}, {_OWN_WAITING}",
    (
        Check("clone 56 220", 0, _IF_ANY_BIT, (_CLONE_THREAD,), True),
        Check("ioctl 16 29", 1, _IF_EQUAL, _ON_OWN_FILES, True),
        Check("socketpair 53 199", 0, _IF_EQUAL, (_AF_UNIX,), True),
        Check("fcntl 72 25", 1, _IF_EQUAL, _FCNTL, True, pretended=_FCNTL_LOCKS),
    ),
    ("clone3 435 435",),
)
"""Whatever a program needs that runs in one process and leaves no trace outside: also threads and files."""


@cache
def program(rules: Rules, machine: str | None = None) -> bytes | None:
    """Instructions of 8 bytes: code, how many to skip when true, when false, and a number. `None`: this kind of machine
    is not known."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    column = 1 + list(_ARCHITECTURES).index(machine)
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for call in rules.calls.split(","):
        if (number := _number(call, column)) is not None:
            instructions += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for call in rules.unknown:
        if (number := _number(call, column)) is not None:
            instructions += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _UNKNOWN)]
    for check in rules.checks:
        if (number := _number(check.call, column)) is not None:
            when_true, when_false = (_ALLOW, _REFUSE) if check.passes else (_REFUSE, _ALLOW)
            outcomes = [(value, when_true) for value in check.values]
            outcomes += [(value, _PRETEND) for value in check.pretended]
            tests = [
                step
                for value, outcome in outcomes
                for step in ((check.test, 0, 1, value), (_RETURN, 0, 0, outcome))
            ]
            look = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * check.argument), *tests, (_RETURN, 0, 0, when_false)]
            instructions += [(_IF_EQUAL, 0, len(look), number), *look]
    instructions.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("HBBI", *each) for each in instructions)


def _number(call: str, column: int) -> int | None:
    word = call.split()[column]
    return None if word == "-" else int(word)
