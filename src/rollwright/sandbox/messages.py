"""Messages between a box's client and its holder. They carry file descriptors, so each is one packet of a socket.

A request that is too long for a packet travels in a memory file, whose descriptor then comes first.
"""

import os
import socket
from typing import TypeVar

import msgspec

from rollwright.sandbox.box import BoxMount
from rollwright.sandbox.leases import BoxRecord

_MAX_PACKET = 60_000
"""Bytes; the kernel's limit is about 200,000."""

_MAX_FILES = 5
_IN_FILE = b"\0"
"""Content of a packet whose message is in a memory file."""

Message = TypeVar("Message")


class HoldRequest(msgspec.Struct, frozen=True, tag="hold"):
    """First message to a new holder: the box that it is to build and guard."""

    record: BoxRecord
    """Without the holder, which fills itself in."""
    folder: str
    """The box's own folder."""
    lower: tuple[str, ...] = ()
    """Folders of the image and of snapshots, topmost first; empty: the holder only guards a container."""
    upper: str = ""
    """Folder to copy as the box's own layer; empty: it has none yet."""
    mounts: tuple[BoxMount, ...] = ()
    hostname: str = "box"
    hosts: tuple[str, ...] = ()
    network_of: int = 0
    """First process of the box whose network this one shares; 0: it has its own."""
    memory: int = 0
    processes: int = 0
    cpus: float = 0.0
    disk: int = 0


class RunRequest(msgspec.Struct, frozen=True, tag="run"):
    """Run a program. Files: the call's own socket, standard input, output and error."""

    command: tuple[str, ...]
    environment: dict[str, str]
    workdir: str
    user: str


class PutRequest(msgspec.Struct, frozen=True, tag="put"):
    """Unpack a tar stream. Files: the call's own socket, and the stream."""

    path: str


class GetRequest(msgspec.Struct, frozen=True, tag="get"):
    """Pack a file or folder into a tar stream. Files: the call's own socket, and the stream."""

    path: str


class ListenRequest(msgspec.Struct, frozen=True, tag="listen"):
    """Open a listening TCP socket on the box's loopback. Files: the call's own socket, on which it is returned."""

    port: int = 0
    process: int = 0
    """Process in whose network it listens; 0: the box's first. A container's holder does not know it."""


class CopyRequest(msgspec.Struct, frozen=True, tag="copy"):
    """Copy the box's own layer to a new folder. Files: the call's own socket."""

    into: str


class RenewRequest(msgspec.Struct, frozen=True, tag="renew"):
    """Renew the lease."""


HolderRequest = RunRequest | PutRequest | GetRequest | ListenRequest | CopyRequest | RenewRequest


class BoxReady(msgspec.Struct, frozen=True, tag="ready"):
    """The box runs."""

    init: int = 0
    """Process id of its first process, outside the box."""
    missing: tuple[str, ...] = ()
    """Limits that this machine cannot set."""


class CallDone(msgspec.Struct, frozen=True, tag="done"):
    """A call has ended."""

    exit_code: int = 0


class CallFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A box did not start, or a call could not be made; the reason is one line."""

    reason: str


HolderReply = BoxReady | CallDone | CallFailed


def send(to: socket.socket, message: msgspec.Struct, files: tuple[int, ...] = ()) -> None:
    body = msgspec.msgpack.encode(message)
    if len(body) <= _MAX_PACKET:
        socket.send_fds(to, [body], files)
        return
    with open(os.memfd_create("rollwright"), "r+b", 0) as file:
        view = memoryview(body)
        while view:
            view = view[file.write(view) :]
        socket.send_fds(to, [_IN_FILE], (file.fileno(), *files))


def receive(from_: socket.socket, kind: type[Message]) -> tuple[Message | None, list[int]]:
    """The next message and its files; `None`: the other side has closed the socket."""
    body, files, _, _ = socket.recv_fds(from_, _MAX_PACKET + 1, _MAX_FILES)
    for each in files:
        os.set_inheritable(each, False)
    if not body:
        return None, files
    if body == _IN_FILE:
        with open(files.pop(0), "rb") as file:
            file.seek(0)
            body = file.read()
    return msgspec.msgpack.decode(body, type=kind), files
