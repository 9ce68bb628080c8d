"""Boxes of services that can only start a program and carry its streams: pods, hosted sandboxes.

Everything that a box does is a shell script there: `ShellBox` writes it, sends it as the first input of a shell, and reads
what comes back. A service has to give one thing, `_start_shell`.

Always true:
- The end of a command is a random mark on both of its streams, so that a program left in the background, which holds the
  streams open, does not hold the command. The streams are read on for it.
- Every process of a command has a token in its environment; a command that is late or cancelled is killed by it.
- The script and the input travel in the stream, never in an address or an argument, so they may be of any length; services
  that cannot close a command's input do not have to, because `head` ends it after the bytes that were announced.

It needs `sh`, `head`, `tr`, `grep`, `tar` and `base64` in the image, which coreutils and busybox have.
"""

import asyncio
import base64
import binascii
import logging
import os
import re
import secrets
import shlex
import tempfile
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, Protocol, Self

from rollwright.sandbox.box import (
    BoxCommand,
    BoxError,
    BoxSpec,
    CommandResult,
    Network,
    RunsCommands,
    Snapshot,
)
from rollwright.sandbox.relay import GATEWAY_PORT, PROXY_PORT, ProxyRelay, Relay, proxy_variables
from rollwright.sandbox.transfer import MAX_ARCHIVE, OutputPipe, read_archive, unpack_folder, write_archive
from rollwright.sandbox.tunnel import PROGRAM, Tunnel

BOOT = 'IFS= read -r n && eval "$(head -c "$n")"'
"""First program of every call: reads the length of a script and the script, and runs it with the rest of its input."""

STDOUT, STDERR = 1, 2

_CALL = "ROLLWRIGHT_CALL"
"""Environment variable by which the processes of a command are found."""

_BLOCK = 64 * 1024
_KILL_SECONDS = 10.0
_SHOWN = 400
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_log = logging.getLogger(__name__)


class ShellStream(Protocol):
    """A shell that runs in a remote box. Raises `BoxError` when the box cannot be reached."""

    async def send(self, data: bytes) -> None:
        """Writes to its input."""
        ...

    async def receive(self) -> tuple[int, bytes] | None:
        """The next piece of `STDOUT` or `STDERR`; `None`: there is no more."""
        ...

    async def close(self) -> None:
        """Leaves it; whether the shell goes on is not said."""
        ...


class CommandTokens(NamedTuple):
    """Random names of one command: what its processes carry, and what marks its end, which they do not know."""

    call: str
    mark: str

    @classmethod
    def draw(cls) -> "CommandTokens":
        return cls(secrets.token_hex(16), secrets.token_hex(16))


class MarkedStream:
    """Finds the mark `MARK CODE` at the end of a stream that comes in pieces."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        self._held = b""
        self.exit_code: int | None = None

    def add(self, piece: bytes) -> bytes:
        """What of the stream so far can be handed on: a begin of the mark is held back."""
        if self.exit_code is not None:
            return b""
        self._held += piece
        at = self._held.find(self._mark)
        if at < 0:
            kept = _overlap(self._held, self._mark)
            given, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
            return given
        given, mark = self._held[:at], self._held[at:]
        if b"\n" in mark:
            self.exit_code = int(mark.split()[1])
            self._held = b""
        else:
            self._held = mark
        return given


def _overlap(content: bytes, token: bytes) -> int:
    """Length of the longest end of `content` with which `token` begins."""
    return next(n for n in range(min(len(content), len(token) - 1), -1, -1) if content.endswith(token[:n]))


def command_script(
    command: str | list[str],
    *,
    tokens: CommandTokens,
    environment: Mapping[str, str] | None = None,
    workdir: str = "/",
    stdin: int = 0,
) -> str:
    """Runs a command with `stdin` bytes of the shell's input, and marks its end."""
    variables = {**(environment or {}), _CALL: tokens.call}
    for name in variables:
        if not _NAME.fullmatch(name):
            raise BoxError(f"environment: {name!r} cannot be the name of a variable of a shell")
    if isinstance(command, str):
        text = shlex.quote(command)
        start = f"if command -v bash >/dev/null 2>&1; then exec bash -c {text}; else exec sh -c {text}; fi"
    else:
        start = f"exec {shlex.join(command)}"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    inner = "\n".join([*lines, f"cd -- {shlex.quote(workdir)} || exit 126" if workdir else ":", start])
    streams = "2>&3 3>&-"
    given = f"head -c {stdin} | (\n{inner}\n) {streams}" if stdin else f"(\n{inner}\n) {streams} </dev/null"
    # What the shell itself says, for example of a killed command, is not the command's.
    mark = f"printf '%s %s\\n' {tokens.mark} $c"
    return f"exec 3>&2 2>/dev/null\n{given}\nc=$?; {mark}; {mark} >&3"


def kill_script(call: str) -> str:
    """Kills every process that was started by the command with this token."""
    return (
        "for f in /proc/[0-9]*/environ; do "
        f"if tr '\\0' '\\n' <$f 2>/dev/null | grep -qx {_CALL}={call}; then "
        "p=${f%/environ}; kill -9 ${p#/proc/} 2>/dev/null; fi; done"
    )


class ShellBox(RunsCommands):
    """A box whose service runs shells."""

    backend_name: str
    root_user = "0"
    """The user that may write everywhere, as the service names it."""

    def __init__(self, spec: BoxSpec, gateway: str) -> None:
        self.spec = spec
        self.gateway_url = ""
        self._gateway = gateway
        self._environment: dict[str, str] = {}
        self._tunnels: list[Tunnel] = []
        self._background: set[asyncio.Task[None]] = set()

    @property
    @abstractmethod
    def id(self) -> str: ...

    @property
    @abstractmethod
    def has_ended(self) -> bool: ...

    @abstractmethod
    async def _start_shell(self, program: str, user: str) -> ShellStream:
        """Starts `sh -c PROGRAM` as a user of the image; empty: the image's own."""
        ...

    @abstractmethod
    async def _end(self) -> None:
        """Ends the box at the service."""
        ...

    async def execute(self, command: BoxCommand) -> CommandResult:
        tokens = CommandTokens.draw()
        script = command_script(
            command.command,
            tokens=tokens,
            environment={**self._environment, **self.spec.environment, **command.environment},
            workdir=command.workdir or self.spec.workdir,
            stdin=len(command.stdin),
        )
        began = time.monotonic()
        outputs = {each: OutputPipe(command.max_output) for each in (STDOUT, STDERR)}
        code, is_late = await self._finish(
            script,
            command.user or self.spec.user,
            command.stdin,
            tokens,
            command.seconds or self.spec.seconds,
            lambda channel, piece: outputs[channel].add(piece),
        )
        texts = [each.text for each in outputs.values()]
        dropped = sum(each.dropped for each in outputs.values())
        return CommandResult(code, texts[0], texts[1], is_late, dropped, time.monotonic() - began)

    async def _finish(  # type: ignore[no-untyped-def]
        self, script: str, user: str, stdin: bytes | IO[bytes], tokens: CommandTokens, seconds: float, add
    ) -> tuple[int, bool]:
        """Runs a script to its mark: the exit code, and whether the time limit ended it."""
        stream = await self._open_shell(script, user)
        sending = asyncio.create_task(_send(stream, stdin))
        reading = asyncio.create_task(_read_to_mark(stream, tokens.mark, add))
        is_marked = False
        try:
            done, _ = await asyncio.wait({reading}, timeout=seconds)
            if done:
                code = reading.result()
                is_marked = True
                return code, False
            await self._kill(tokens.call)
            done, _ = await asyncio.wait({reading}, timeout=_KILL_SECONDS)
            if not done:
                raise BoxError("a command could not be killed")
            return reading.result(), True
        except asyncio.CancelledError:
            self._in_background(self._kill(tokens.call))
            raise
        finally:
            for task in (sending, reading):
                task.cancel()
            await asyncio.gather(sending, reading, return_exceptions=True)
            if is_marked:
                self._in_background(_drain(stream))
            else:
                with suppress(BoxError):
                    await stream.close()

    async def put(self, source: bytes | Path, path: str) -> None:
        _check_path(path)
        folder, tokens = shlex.quote(unpack_folder(path, source)), CommandTokens.draw()
        with tempfile.TemporaryFile() as packed:
            await asyncio.to_thread(write_archive, source, path, packed)
            size = packed.tell()
            packed.seek(0)
            script = command_script(
                ["sh", "-c", f"mkdir -p {folder} && tar -xpf - -C {folder}"], tokens=tokens, stdin=size
            )
            await self._transfer(script, packed, tokens, path, lambda _: None)

    async def get(self, path: str, into: Path | None = None) -> bytes:
        _check_path(path)
        quoted, tokens = shlex.quote(path), CommandTokens.draw()
        name, folder = shlex.quote(os.path.basename(path)), shlex.quote(os.path.dirname(path) or "/")
        pack = (
            f'[ -e {quoted} ] || {{ echo "No such file or directory" >&2; exit 3; }}; '
            f"if [ -d {quoted} ]; then tar -C {quoted} -cf - .; else tar -C {folder} -cf - -- {name}; fi | base64"
        )
        script = command_script(["sh", "-c", pack], tokens=tokens)
        with tempfile.TemporaryFile() as packed:
            decoder = _Base64Writer(packed, path)
            await self._transfer(script, b"", tokens, path, decoder.add)
            packed.seek(0)
            return await asyncio.to_thread(read_archive, packed, path, into)

    async def _transfer(  # type: ignore[no-untyped-def]
        self, script: str, stdin: bytes | IO[bytes], tokens: CommandTokens, path: str, write
    ) -> None:
        errors = OutputPipe(4096)

        def add(channel: int, piece: bytes) -> None:
            errors.add(piece) if channel == STDERR else write(piece)

        code, is_late = await self._finish(script, self.root_user, stdin, tokens, self.spec.seconds, add)
        if is_late:
            raise BoxError(f"{path}: was not copied within {self.spec.seconds:g} s")
        if code != 0:
            raise BoxError(f"{path}: {errors.text.strip()[-_SHOWN:] or 'could not be copied'}")

    async def snapshot(self) -> Snapshot:
        raise BoxError(f"box: the backend {self.backend_name} cannot make a snapshot; bubblewrap can")

    async def fork(self) -> Self:
        raise BoxError(f"box: the backend {self.backend_name} cannot fork; bubblewrap can")

    async def fork_note(self) -> str:
        return f"the backend {self.backend_name} cannot fork"

    async def change_network(self, network: Network, allowed_hosts: tuple[str, ...] = ()) -> None:
        if Network.PUBLIC in (network, self.spec.network):
            raise BoxError(
                f"the backend {self.backend_name} cannot open or close the network public of a box that runs"
            )
        await self._close_tunnels()
        self.spec = self.spec.replace(network=network, allowed_hosts=allowed_hosts)
        self._environment, self.gateway_url = {}, ""
        await self.open_network()

    async def _close_tunnels(self) -> None:
        for tunnel in self._tunnels:
            await tunnel.close()
        self._tunnels.clear()

    async def stop(self) -> None:
        await self._close_tunnels()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._end()

    async def open_network(self) -> None:
        """Opens the ways out that the spec allows, through tunnels to this process; a public box has its own."""
        if self.spec.network is Network.GATEWAY and not self._gateway:
            raise BoxError("network gateway: this attempt has none; accepted: none, allowlist, public")
        if self.spec.network is Network.GATEWAY:
            await self._open_tunnel(Relay(self._gateway), GATEWAY_PORT)
            self.gateway_url = f"http://127.0.0.1:{GATEWAY_PORT}"
        elif self.spec.network is Network.ALLOWLIST:
            await self._open_tunnel(ProxyRelay(self.spec.allowed_hosts), PROXY_PORT)
            self._environment = proxy_variables(f"http://127.0.0.1:{PROXY_PORT}")

    async def _open_tunnel(self, relay: Relay, port: int) -> None:
        script = f"exec python3 -u -c {shlex.quote(PROGRAM)} {port}"
        tunnel = Tunnel(await self._open_shell(script, ""), relay)
        try:
            await tunnel.open()
        except BoxError as error:
            raise BoxError(
                f"network {self.spec.network}: the relay in the box did not start ({error}); the image needs python3"
            ) from error
        self._tunnels.append(tunnel)

    async def _open_shell(self, script: str, user: str) -> ShellStream:
        if self.has_ended:
            raise BoxError("the box has ended")
        stream = await self._start_shell(BOOT, user)
        content = script.encode()
        await stream.send(f"{len(content)}\n".encode() + content)
        return stream

    async def _kill(self, call: str) -> None:
        with suppress(BoxError):
            stream = await self._open_shell(kill_script(call), self.root_user)
            try:
                async with asyncio.timeout(_KILL_SECONDS):
                    while await stream.receive() is not None:
                        pass
            except TimeoutError:
                _log.warning("box %s: a command may still run", self.id)
            finally:
                await stream.close()

    def _in_background(self, work) -> None:  # type: ignore[no-untyped-def]
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _send(stream: ShellStream, content: bytes | IO[bytes]) -> None:
    """Sends the input of a command; one that does not read it to its end is not an error."""
    with suppress(BoxError):
        if isinstance(content, bytes):
            for at in range(0, len(content), _BLOCK):
                await stream.send(content[at : at + _BLOCK])
            return
        while block := await asyncio.to_thread(content.read, _BLOCK):
            await stream.send(block)


async def _drain(stream: ShellStream) -> None:
    """Reads on what a program writes that was left in the background: it must not meet a closed stream."""
    try:
        with suppress(BoxError):
            while await stream.receive() is not None:
                pass
    finally:
        with suppress(BoxError):
            await stream.close()


async def _read_to_mark(stream: ShellStream, mark: str, add) -> int:  # type: ignore[no-untyped-def]
    """Hands on both streams until both have their mark; a shell that ends before that could not start the command."""
    marks = {STDOUT: MarkedStream(mark), STDERR: MarkedStream(mark)}
    last = b""
    while (received := await stream.receive()) is not None:
        channel, piece = received
        if channel not in marks:
            continue
        if given := marks[channel].add(piece):
            add(channel, given)
            last = given if channel == STDERR else last
        if (code := marks[STDOUT].exit_code) is not None and marks[STDERR].exit_code is not None:
            return code
    told = last.decode(errors="replace").strip().splitlines()
    raise BoxError(told[-1][-_SHOWN:] if told else "the box has ended")


class _Base64Writer:
    """Decodes base64 that comes in lines and pieces."""

    def __init__(self, to: IO[bytes], path: str) -> None:
        self._to = to
        self._path = path
        self._held = b""
        self._left = MAX_ARCHIVE

    def add(self, piece: bytes) -> None:
        content = self._held + piece.translate(None, b"\r\n")
        whole = len(content) // 4 * 4
        self._held = content[whole:]
        self._left -= whole
        if self._left < 0:
            raise BoxError(f"{self._path}: is larger than {MAX_ARCHIVE} bytes")
        try:
            self._to.write(base64.b64decode(content[:whole], validate=True))
        except binascii.Error as error:
            raise BoxError(f"{self._path}: could not be copied") from error


def _check_path(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise BoxError(f"a path in a box is absolute, got {path!r}")
