"""Locks the current process in, before it runs code that came with an answer.

After `confine` the process can compute, read files and write to what it has open. Where the kernel allows
it (Linux on x86-64 and ARM64) a system-call filter lets nothing else through: no new file, process, signal
or connection. Elsewhere what remains are the resource limits, the user `nobody` when started as root, and
an empty network. A refused call fails with "operation not permitted"; it does not end the process.
"""

import ctypes
import math
import os
import platform
import resource
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

NOBODY = 65534
"""User and group id of `nobody` on Linux."""

_MAX_OPEN_FILES = 64
"""Enough to import a module that a scorer loads late."""

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_SIGKILL = 9

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""The five instructions of the kernel's filter language that are needed here."""
_ALLOW, _REFUSE = 0x7FFF_0000, 0x0005_0001
"""Refusing gives the caller error 1, EPERM."""
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
"""Where a system call's number, its architecture and its arguments of 8 bytes stand."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_X32_CALLS = 0x4000_0000
"""x86-64 accepts a second numbering of the same calls from here on; it is refused as a whole."""

_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

_OPENING = {"x86_64": {2: 1, 257: 2}, "aarch64": {56: 2}}
"""The calls `open` and `openat`, and which of their arguments has the flags."""

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


def confine(memory: int, cpu_seconds: float) -> None:
    """For good: `memory` bytes and about `cpu_seconds` more than now, and nothing that reaches outside."""
    _limit(memory, cpu_seconds)
    if os.geteuid() == 0 and _readable_by_all(sys.path):
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)  # a change of user would take this back
        _filter_calls()


def leave_network() -> None:
    """Gives this process and its children a network with nothing in it, where the kernel allows that."""
    if sys.platform != "linux":
        return
    spaces = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    ctypes.CDLL(None).unshare(spaces)


def _limit(memory: int, cpu_seconds: float) -> None:
    limits = {
        resource.RLIMIT_CPU: math.ceil(time.process_time() + cpu_seconds) + 1,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
    }
    statm = Path("/proc/self/statm")
    if statm.exists():
        limits[resource.RLIMIT_AS] = int(statm.read_text().split()[0]) * resource.getpagesize() + memory
    for kind, wanted in limits.items():
        _, highest = resource.getrlimit(kind)
        limit = wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)
        resource.setrlimit(kind, (limit, limit))


def _readable_by_all(places: Iterable[str]) -> bool:
    """Whether `nobody` could still import from there: every folder on the way is open to others."""
    resolved = (Path(place).resolve() for place in places if place)
    folders = {folder for place in resolved if place.is_dir() for folder in (place, *place.parents)}
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in folders)


def _filter_calls() -> None:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return
    program = _program(machine)
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def _prctl(option: int, *arguments: int) -> None:
    """Best effort: a kernel without the option leaves the other measures in place."""
    padded = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    ctypes.CDLL(None).prctl(option, *padded)


def _program(machine: str) -> bytes:
    """Instructions of 8 bytes: code, how many to skip when true, when false, and a number."""
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _REFUSE),
    ]
    column = 1 + list(_ARCHITECTURES).index(machine)
    for number in [int(call.split()[column]) for call in _HARMLESS.split(",") if call.split()[column] != "-"]:
        instructions += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, flags in _OPENING[machine].items():
        instructions += [
            (_IF_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * flags),
            (_IF_ANY_BIT, 0, 1, _WRITING),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
        ]
    instructions.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("HBBI", *each) for each in instructions)
