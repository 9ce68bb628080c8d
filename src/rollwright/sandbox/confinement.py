"""The walls of a sandbox, put up by the process that will be behind them.

Behind them are: no network, no other process, no file but its own in memory and the Python library for reading, no
capability, an unprivileged user, and the system calls of a program that computes. Everything is tried when a sandbox
starts; what the machine refuses is `Missing`, in one line.
"""

import math
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rollwright.sandbox import kernel
from rollwright.sandbox.calls import COMPUTING, program
from rollwright.sandbox.limits import SandboxLimits, address_space, lower

_ROOT = Path("/proc")
"""Where the sandbox's root is built: a folder that exists and that nothing is shown from."""

WORK = Path("/tmp")
"""The sandbox's working folder, the only one it can write to."""

_LIBRARIES = tuple(map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64")))
"""Where modules of the standard library find what they link to."""

_ROOT_SIZE = 1 << 20
"""Bytes: empty folders only."""

_MAX_OPEN_FILES = 64
"""What lies in a pipe or a pair of sockets is memory of the kernel, outside the limit. Their number times their size,
which cannot be raised (64 KiB, and what `net.core.wmem_default` says, usually 208 KiB), is what all of them can hold."""


class Missing(Exception):
    """The machine cannot give what a sandbox needs."""


def standard_library() -> Path:
    """Also for an interpreter in an environment of its own, which has none."""
    return Path(os.__file__).resolve().parent


def enter_namespaces() -> None:
    """Own network, processes, mounts and messages, for the children of this process. Root gets its user namespace at
    the end of `lock_in`: until then it needs to see what only root sees."""
    spaces = kernel.NEW_NETWORK | kernel.NEW_PIDS | kernel.NEW_MOUNTS | kernel.NEW_IPC
    user, group = os.geteuid(), os.getegid()
    _needed("namespaces", lambda: kernel.unshare(spaces if user == 0 else spaces | kernel.NEW_USER))
    if user != 0:
        _needed("a user namespace", lambda: kernel.keep_own_ids(user, group))


def lock_in(limits: SandboxLimits, folders: Sequence[Path], needed: Sequence[Path]) -> None:
    """For good. Called by the first process of the new namespaces; `needed` are files it must be able to read."""
    if (calls := program(COMPUTING)) is None:
        raise Missing(f"a system-call filter: none is known for {platform.machine()}")
    memory = address_space(limits.memory)
    _needed("an own root folder", lambda: _change_root(limits, folders))
    if os.geteuid() == 0:
        _needed("an unprivileged user", kernel.become_nobody)
        _needed("a user namespace", lambda: kernel.unshare(kernel.NEW_USER))
    _readable([standard_library() / "os.py", *needed])
    _needed("an end with its parent", kernel.die_with_parent)
    _needed("an end of capabilities", kernel.drop_capabilities)
    _limit(limits, memory)
    _needed("a system-call filter", lambda: kernel.filter_calls(calls))
    _prove()


def make_do(limits: SandboxLimits, folder: Path, needed: Sequence[Path]) -> None:
    """What can be had without namespaces: limits, the user `nobody` where root starts it, and the filter. Nothing runs
    as root."""
    os.chdir(folder)
    memory = address_space(limits.memory)
    if os.geteuid() == 0:
        _needed("an unprivileged user", kernel.become_nobody)
    _readable(needed)
    _limit(limits, memory)
    if sys.platform == "linux" and (calls := program(COMPUTING)) is not None:
        with suppress(OSError):
            kernel.die_with_parent()
            kernel.filter_calls(calls)


def _readable(needed: Sequence[Path]) -> None:
    for file in needed:
        try:
            with file.open("rb"):
                pass
        except OSError as error:
            raise Missing(
                f"the right of an unprivileged user to read {file} ({error.strerror}); let others read that "
                f"folder (chmod -R o+rX), or start as a user other than root"
            ) from error


def _needed(what: str, step: Callable[[], None]) -> None:
    try:
        step()
    except OSError as error:
        raise Missing(f"{what}: {error.strerror or error}") from error


def _change_root(limits: SandboxLimits, folders: Sequence[Path]) -> None:
    """A root with nothing in it but what may be read, and a folder in memory to write to."""
    kernel.keep_mounts_private()
    kernel.mount_memory(_ROOT, _ROOT_SIZE, 0o755)
    work = _ROOT / WORK.relative_to("/")
    work.mkdir()
    kernel.mount_memory(work, limits.disk, 0o777)
    for place in _outermost([*_LIBRARIES, standard_library(), *folders]):
        inside = _ROOT / place.relative_to("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        if place.is_symlink():
            inside.symlink_to(place.readlink())
        else:
            inside.mkdir(exist_ok=True)
            kernel.show_read_only(place, inside)
    kernel.make_read_only(_ROOT)
    kernel.change_root(_ROOT)
    os.chdir(WORK)


def _outermost(places: Sequence[Path]) -> list[Path]:
    """Those that exist, without those inside another."""
    found = [each for each in dict.fromkeys(places) if each.is_dir()]
    return [each for each in found if not set(each.parents) & set(found)]


def _limit(limits: SandboxLimits, memory: Mapping[int, int]) -> None:
    lower(
        {
            resource.RLIMIT_CPU: math.ceil(time.process_time()) + limits.cpu_seconds,
            resource.RLIMIT_FSIZE: limits.disk,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: 1 + limits.threads,
            resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
            **memory,
        }
    )


def _prove() -> None:
    """Tries what must not work."""
    for what, attempt in (("a connection", socket.socket), ("another process", os.fork)):
        try:
            made = attempt()
        except OSError:
            continue
        if made == 0:
            os._exit(0)
        raise Missing(f"a system-call filter that holds: {what} could be made")
