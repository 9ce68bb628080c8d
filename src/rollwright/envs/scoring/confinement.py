"""Locks the current process in, before it runs code that came with an answer.

After `confine` the process can compute, read files and write to what it has open. Where the kernel allows
it (Linux on x86-64 and ARM64) a system-call filter lets nothing else through: no new file, process, signal
or connection. Elsewhere what remains are the resource limits, the user `nobody` when started as root, and
an empty network. A refused call fails with "operation not permitted"; it does not end the process.
"""

import ctypes
import os
import platform
import resource
import struct
import sys
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

_HARMLESS = {
    # read write close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
    # rt_sigreturn pread64 readv writev access select sched_yield mremap madvise dup dup2 nanosleep getpid
    # exit uname fcntl getcwd readlink gettimeofday getrlimit getrusage sysinfo getuid getgid geteuid getegid
    # getppid sigaltstack gettid time futex sched_getaffinity getdents64 restart_syscall clock_gettime
    # clock_getres clock_nanosleep exit_group newfstatat readlinkat faccessat pselect6 ppoll set_robust_list
    # dup3 getrandom membarrier statx rseq faccessat2
    "x86_64": (
        *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 23, 24, 25, 28, 32, 33, 35, 39),
        *(
            60,
            63,
            72,
            79,
            89,
            96,
            97,
            98,
            99,
            102,
            104,
            107,
            108,
            110,
            131,
            186,
            201,
            202,
            204,
            217,
            219,
            228,
        ),
        *(229, 230, 231, 262, 267, 269, 270, 271, 273, 292, 318, 324, 332, 334, 439),
    ),
    # getcwd dup dup3 fcntl faccessat close getdents64 lseek read write readv writev pread64 pselect6 ppoll
    # readlinkat newfstatat fstat exit exit_group futex set_robust_list nanosleep clock_gettime clock_getres
    # clock_nanosleep sched_getaffinity sched_yield restart_syscall sigaltstack rt_sigaction rt_sigprocmask
    # rt_sigreturn uname getrlimit getrusage gettimeofday getpid getppid getuid geteuid getgid getegid gettid
    # sysinfo brk munmap mremap mmap mprotect madvise getrandom membarrier statx rseq faccessat2
    "aarch64": (
        *(17, 23, 24, 25, 48, 57, 61, 62, 63, 64, 65, 66, 67, 72, 73, 78, 79, 80, 93, 94, 98, 99, 101, 113),
        *(114, 115, 123, 124, 128, 132, 134, 135, 139, 160, 163, 165, 169, 172, 173, 174, 175, 176, 177, 178),
        *(179, 214, 215, 216, 222, 226, 233, 278, 283, 291, 293, 439),
    ),
}


def confine(memory: int, cpu_seconds: int) -> None:
    """For good: `memory` bytes and `cpu_seconds` more than now, and nothing that reaches outside."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    _limit(memory, cpu_seconds)
    if hasattr(os, "geteuid") and os.geteuid() == 0 and _readable_by_all(sys.path):
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    _filter_calls()


def leave_network() -> None:
    """Gives this process and its children a network with nothing in it, where the kernel allows that."""
    if sys.platform != "linux":
        return
    spaces = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    ctypes.CDLL(None).unshare(spaces)


def _limit(memory: int, cpu_seconds: int) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
    }
    statm = Path("/proc/self/statm")
    if statm.exists():
        limits[resource.RLIMIT_AS] = int(statm.read_text().split()[0]) * resource.getpagesize() + memory
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def _readable_by_all(places: Iterable[str]) -> bool:
    """Whether `nobody` could still import from there: every folder on the way is open to others."""
    resolved = (Path(place).resolve() for place in places if place)
    folders = {folder for place in resolved if place.is_dir() for folder in (place, *place.parents)}
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in folders)


def _filter_calls() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
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
    for number in _HARMLESS[machine]:
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
