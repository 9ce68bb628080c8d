"""The seccomp filter: the system calls that a sandboxed process may make, compiled to classic BPF.

A call that is not listed fails with EPERM and does not end the process. Supported are Linux on x86-64 and on ARM64.
"""

import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _JUMP, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
"""The six BPF instructions that the filter uses."""
_MAX_SKIP = 255
"""Instructions that a conditional jump can skip."""
_ALLOW, _REFUSE, _UNKNOWN, _PRETEND = 0x7FFF_0000, 0x0005_0001, 0x0005_0026, 0x0005_0000
"""Return values of the filter: allow; fail with EPERM; fail with ENOSYS, as if the kernel lacked the call; and errno 0,
which makes the call a no-op that succeeds."""
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
"""Offsets in `struct seccomp_data`: call number, architecture, and arguments of 8 bytes each."""

_X32_CALLS = 0x4000_0000
"""First call number of the x32 ABI, a second numbering of the same calls on x86-64; all of it is refused."""

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
"""Calls that are safe with any arguments: name, number on x86-64, number on ARM64 (`-`: none)."""

_OWN_FILES = """
    open 2 -, openat 257 56, chdir 80 49, chmod 90 -, close_range 436 436, copy_file_range 326 285, creat 85 -,
    fallocate 285 47, fchdir 81 50, fchmod 91 52, fchmodat 268 53, fdatasync 75 83, flock 73 32,
    fstatfs 138 44, fsync 74 82, ftruncate 77 46, getdents 78 -, link 86 -, linkat 265 37, mkdir 83 -,
    mkdirat 258 34, pwrite64 18 68, pwritev 296 70, preadv 295 69, rename 82 -, renameat 264 38, renameat2 316 276,
    rmdir 84 -, sendfile 40 71, statfs 137 43, symlink 88 -, symlinkat 266 36, truncate 76 45, umask 95 166,
    unlink 87 -, unlinkat 263 35, utimensat 280 88
"""
"""File calls: the mount namespace shows only the process's own and readable files."""

_OWN_WAITING = """
    epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_wait 232 -, eventfd2 290 19, pipe 22 -,
    pipe2 293 59, recvfrom 45 207, rt_sigpending 127 136, rt_sigtimedwait 128 137, sendto 44 206, setitimer 38 103,
    shutdown 48 210, getsockopt 55 209, getsockname 51 204, getpeername 52 205,
    sched_getparam 143 121, sched_getscheduler 145 120, getpgrp 111 -, getpgid 121 155, getgroups 115 158
"""
"""Calls of threads and event loops. `socket` is not among them, nor is `setsockopt`: RLIMIT_AS does not count kernel
buffers, so no buffer may be enlarged."""

_AF_UNIX = 1
_FCNTL = (0, 1, 2, 3, 4, 5, 1030, 1032)
"""Allowed `fcntl` commands: duplicate a descriptor, read and set its flags, query locks and the size of a pipe. Refused:
enlarging a pipe, signals, leases, change notifications."""
_FCNTL_LOCKS = (6, 7)
"""Commands that set a record lock. They succeed without effect: all files belong to this one process, so no such lock could
ever block it, and each real lock would take kernel memory."""

_CLONE_THREAD = 0x0001_0000
_ON_OWN_FILES = (0x5421, 0x5450, 0x5451)
"""Allowed `ioctl` requests, which concern the descriptor itself: FIONBIO, FIONCLEX and FIOCLEX."""


@dataclass(frozen=True)
class ArgumentCheck:
    """A call that is allowed or refused by one of its arguments."""

    call: str
    """Name, number on x86-64, number on ARM64."""
    argument: int
    test: int
    values: tuple[int, ...]
    passes: bool
    """True: allowed if the test holds for one of the values. False: allowed if it holds for none."""
    pretended: tuple[int, ...] = ()
    """Values for which the call succeeds without effect."""


@dataclass(frozen=True)
class SeccompRules:
    """System calls that a process may make."""

    calls: str
    checks: tuple[ArgumentCheck, ...]
    unknown: tuple[str, ...] = ()
    """Calls that fail with ENOSYS, so that libc falls back to older forms whose arguments can be checked."""
    refused: str = ""
    """Calls that fail with EPERM. Where there are any, every call that is not named is allowed."""


SANDBOX_RULES = SeccompRules(
    f"{_HARMLESS}, {_OWN_FILES}, {_OWN_WAITING}",
    (
        ArgumentCheck("clone 56 220", 0, _IF_ANY_BIT, (_CLONE_THREAD,), True),
        ArgumentCheck("ioctl 16 29", 1, _IF_EQUAL, _ON_OWN_FILES, True),
        ArgumentCheck("socketpair 53 199", 0, _IF_EQUAL, (_AF_UNIX,), True),
        ArgumentCheck("fcntl 72 25", 1, _IF_EQUAL, _FCNTL, True, pretended=_FCNTL_LOCKS),
    ),
    ("clone3 435 435",),
)
"""Calls of a program that computes in one process, with threads and files of its own."""

_NEW_NAMESPACES = 0x7E02_0000
"""Flags of `clone` that make namespaces: in one of its own a process would have all capabilities again."""

BOX_RULES = SeccompRules(
    "",
    (ArgumentCheck("clone 56 220", 0, _IF_ANY_BIT, (_NEW_NAMESPACES,), False),),
    ("clone3 435 435", "io_uring_setup 425 425", "io_uring_enter 426 426", "io_uring_register 427 427"),
    """acct 163 89, add_key 248 217, bpf 321 280, clock_adjtime 305 266, clock_settime 227 112, delete_module 176 106,
    finit_module 313 273, fsconfig 431 431, fsmount 432 432, fsopen 430 430, fspick 433 433, init_module 175 105,
    ioperm 173 -, iopl 172 -, kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, lookup_dcookie 212 18,
    mount 165 40, mount_setattr 442 442, move_mount 429 429, nfsservctl 180 42, open_by_handle_at 304 265,
    open_tree 428 428, perf_event_open 298 241, pivot_root 155 41, quotactl 179 60, reboot 169 142,
    request_key 249 218, setns 308 268, settimeofday 164 170, swapoff 168 225, swapon 167 224, umount2 166 39,
    unshare 272 97, userfaultfd 323 282, vhangup 153 58""",
)
"""A box runs any program; refused are the calls by which others have got out of containers."""


Instruction = tuple[int, int, int, int]
"""Opcode, jump if true, jump if false, operand."""


@cache
def compile_filter(rules: SeccompRules, machine: str | None = None) -> bytes | None:
    """BPF instructions of 8 bytes each; `None`: an unsupported machine. The call's number is found by binary search: the kernel
    runs a new filter once for every number, which would take longest of all that starts a sandbox."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),  # call numbers mean other calls in another ABI, such as 32-bit x86
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _REFUSE),
        *_search(_ranges(rules, 1 + list(_ARCHITECTURES).index(machine))),
    ]
    return b"".join(struct.pack("HBBI", *each) for each in instructions)


def _ranges(rules: SeccompRules, column: int) -> list[tuple[int, list[Instruction]]]:
    """First numbers of all ranges of calls that are treated alike, in order, with the instructions of their treatment."""
    treatments: dict[int, list[Instruction]] = {}

    def treat(calls: Iterable[str], instructions: list[Instruction]) -> None:
        for call in filter(None, calls):
            if (number := _number(call, column)) is not None:
                treatments.setdefault(number, instructions)

    treat(rules.calls.split(","), [(_RETURN, 0, 0, _ALLOW)])
    treat(rules.refused.split(","), [(_RETURN, 0, 0, _REFUSE)])
    treat(rules.unknown, [(_RETURN, 0, 0, _UNKNOWN)])
    for check in rules.checks:
        treat([check.call], _examine(check))
    others: list[Instruction] = [(_RETURN, 0, 0, _ALLOW if rules.refused else _REFUSE)]
    ranges = [(0, others)]
    for number in sorted({edge for each in treatments for edge in (each, each + 1)}):
        treatment = treatments.get(number, others)
        if treatment != ranges[-1][1]:
            ranges.append((number, treatment))
    return ranges


def _examine(check: ArgumentCheck) -> list[Instruction]:
    when_true, when_false = (_ALLOW, _REFUSE) if check.passes else (_REFUSE, _ALLOW)
    outcomes = [(value, when_true) for value in check.values]
    outcomes += [(value, _PRETEND) for value in check.pretended]
    tests = [
        step for value, outcome in outcomes for step in ((check.test, 0, 1, value), (_RETURN, 0, 0, outcome))
    ]
    return [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * check.argument), *tests, (_RETURN, 0, 0, when_false)]


def _search(ranges: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Instructions that find the range of the loaded number and treat it."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    if len(below) <= _MAX_SKIP:
        return [(_IF_AT_LEAST, len(below), 0, ranges[middle][0]), *below, *above]
    return [(_IF_AT_LEAST, 0, 1, ranges[middle][0]), (_JUMP, 0, 0, len(below)), *below, *above]


def _number(call: str, column: int) -> int | None:
    word = call.split()[column]
    return None if word == "-" else int(word)
