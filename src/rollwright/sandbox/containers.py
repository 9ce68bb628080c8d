"""Boxes as containers of podman or docker, by their commands.

A container is named and labelled by its box's id; the holder of the box (`rollwright.sandbox.holder`) removes it by that name
when its process or its lease ends. Images are the engine's own, or those of the store of this package, which are given to the
engine when they are first used. Isolation is the engine's: its default capabilities and system-call filter, without new
privileges. What it does not promise: with docker, that its daemon is not reached by other ways than a mounted socket, which
no box has; and that a command that is cancelled ends before its time limit.
"""

import asyncio
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import msgspec

from rollwright.sandbox.box import (
    HOST_IMAGE,
    BoxCommand,
    BoxError,
    BoxLabel,
    BoxSpec,
    CommandResult,
    Feature,
    Network,
    RunsCommands,
    Snapshot,
)
from rollwright.sandbox.building import engine_environment, offer_image
from rollwright.sandbox.holder_client import HolderLine, HolderPool, own_process
from rollwright.sandbox.leases import BoxRecord, boot_id, boxes_folder, new_box_id, state_folder
from rollwright.sandbox.messages import HoldRequest, ListenRequest
from rollwright.sandbox.relay import (
    GATEWAY_PORT,
    PROXY_PORT,
    ProxyRelay,
    Relay,
    close_relays,
    proxy_variables,
)
from rollwright.sandbox.transfer import OutputPipe

LABEL = "rollwright.box"
_START_SECONDS = 120.0
_KILL_SECONDS = 10.0
_SHOWN = 400

_WITH_LIMIT = 'if command -v timeout >/dev/null; then exec timeout -s KILL "$0" "$@"; else exec "$@"; fi'
"""Runs a command with a time limit inside the container: ending the engine's client would leave it running."""

_SHELL = 'if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'


class ContainerBackend:
    """Starts containers with one engine. Belongs to one event loop."""

    features = frozenset({Feature.COMMANDS, Feature.IMAGES, Feature.GATEWAY, Feature.NETWORK, Feature.MOUNTS})
    name = "podman"

    def __init__(self, *, state: str = "") -> None:
        """`state`: folder of boxes and images; empty: the user's."""
        self.state = Path(state).absolute() if state else state_folder()
        self.holders = HolderPool(self.state)

    async def find_obstacle(self) -> str:
        if shutil.which(self.name) is None:
            return f"the program {self.name} is missing; install the package {self.name}"
        code, _, errors = await self.call(["info"], 30.0)
        return "" if code == 0 else f"{self.name} info: {_last_line(errors)}"

    async def start(self, spec: BoxSpec, label: BoxLabel, *, gateway: str = "") -> "ContainerBox":
        if spec.image == HOST_IMAGE or spec.folder or spec.layers:
            raise BoxError(
                f"box: the backend {self.name} needs an image; bubblewrap starts from the host or a folder"
            )
        if spec.network is Network.GATEWAY and not gateway:
            raise BoxError("network gateway: this attempt has none; accepted: none, allowlist, public")
        reference = await asyncio.to_thread(offer_image, self.state, spec.image, self.name)
        box_id = new_box_id(self.state)
        record = BoxRecord(
            id=box_id,
            backend=self.name,
            label=label if label.worker else msgspec.structs.replace(label, worker=own_process()),
            image=spec.image,
            boot_id=boot_id(),
            holder=0,
            holder_start=0,
            created=time.time(),
            remove=(shutil.which(self.name) or self.name, "rm", "--force", "--ignore", "--time", "0", box_id)
            if self.name == "podman"
            else (shutil.which(self.name) or self.name, "rm", "--force", box_id),
            remove_environment={
                key: value
                for key, value in engine_environment(self.state).items()
                if key.startswith(("CONTAINER", "DOCKER", "XDG_", "HOME", "PATH"))
            },
        )
        line, _ = await self.holders.hold(HoldRequest(record, str(boxes_folder(self.state) / box_id)))
        try:
            code, _, errors = await self.call(self._arguments(spec, box_id, reference), _START_SECONDS)
            if code != 0:
                raise BoxError(f"a box did not start: {self.name}: {_last_line(errors)}")
            box = ContainerBox(self, line, spec, gateway)
            await box.open_network()
        except BaseException:
            line.drop()
            raise
        return box

    async def aclose(self) -> None:
        await self.holders.close()

    async def call(self, words: list[str], seconds: float, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        """Runs the engine's command: exit code, output and errors."""
        process = await asyncio.create_subprocess_exec(
            self.name,
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=engine_environment(self.state),
        )
        try:
            async with asyncio.timeout(seconds):
                output, errors = await process.communicate(stdin)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise BoxError(f"{self.name} {words[0]}: gave no answer within {seconds:g} s") from None
        except BaseException:
            process.kill()
            raise
        return process.returncode or 0, output, errors

    def _arguments(self, spec: BoxSpec, box_id: str, reference: str) -> list[str]:
        network = "none" if spec.network is not Network.PUBLIC else "default"
        words = [
            "run",
            "--detach",
            "--name",
            box_id,
            "--label",
            f"{LABEL}={box_id}",
            "--hostname",
            spec.hostname,
        ]
        words += ["--network", network] if network == "none" else []
        words += ["--memory", f"{spec.memory_mb}m", "--pids-limit", str(spec.processes)]
        words += ["--cpus", f"{spec.cpus:g}"] if spec.cpus else []
        words += ["--security-opt", "no-new-privileges", "--pull", "never"]
        for name in spec.hosts:
            words += ["--add-host", f"{name}:127.0.0.1"] if network == "none" else []
        for each in spec.mounts:
            words += ["--volume", f"{each.source}:{each.path}{':ro' if each.read_only else ''}"]
        return [
            *words,
            "--entrypoint",
            "/bin/sh",
            reference,
            "-c",
            "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done",
        ]


class DockerBackend(ContainerBackend):
    """Containers of docker."""

    name = "docker"


class ContainerBox(RunsCommands):
    """One container as a box."""

    def __init__(self, backend: ContainerBackend, line: HolderLine, spec: BoxSpec, gateway: str) -> None:
        self._backend = backend
        self._line = line
        self._gateway = gateway
        self._relays: list[Relay] = []
        self._environment: dict[str, str] = {}
        self.spec = spec
        self.gateway_url = ""

    @property
    def id(self) -> str:
        return self._line.record.id

    @property
    def has_ended(self) -> bool:
        return self._line.has_ended

    async def execute(self, command: BoxCommand) -> CommandResult:
        if self.has_ended:
            raise BoxError("the box has ended")
        limit, given = command.seconds or self.spec.seconds, command.command
        words = ["sh", "-c", _SHELL, given] if isinstance(given, str) else given
        options = ["exec", "--interactive"]
        for key, value in {**self._environment, **self.spec.environment, **command.environment}.items():
            options += ["--env", f"{key}={value}"]
        if chosen := command.user or self.spec.user:
            options += ["--user", chosen]
        if folder := command.workdir or self.spec.workdir:
            options += ["--workdir", folder]
        began = time.monotonic()
        limited = [*options, self.id, "sh", "-c", _WITH_LIMIT, f"{limit:.3f}", *words]
        code, output, errors = await self._backend.call(limited, limit + _KILL_SECONDS, command.stdin)
        taken = time.monotonic() - began
        texts = [_bounded(each, command.max_output) for each in (output, errors)]
        is_late = code == 137 and taken >= limit
        return CommandResult(code, texts[0][0], texts[1][0], is_late, texts[0][1] + texts[1][1], taken)

    async def put(self, source: bytes | Path, path: str) -> None:
        parent = (
            path
            if isinstance(source, Path) and await asyncio.to_thread(source.is_dir)
            else os.path.dirname(path)
        )
        made = await self.run(["mkdir", "-p", parent or "/"], user="0")
        if not made.ok:
            raise BoxError(f"{path}: {made.stderr.strip()[-_SHOWN:]}")
        with tempfile.TemporaryDirectory(prefix="rollwright-put-") as folder:
            if isinstance(source, bytes):
                given = os.path.join(folder, "file")
                await asyncio.to_thread(Path(given).write_bytes, source)
            else:
                given = os.path.join(source, ".") if parent == path else str(source)
            await self._copy(given, f"{self.id}:{path}", path)

    async def get(self, path: str, into: Path | None = None) -> bytes:
        is_folder = (await self.run(["test", "-d", path], user="0")).ok
        if is_folder and into is None:
            raise BoxError(f"{path}: is not a file; give a folder to copy it into")
        with tempfile.TemporaryDirectory(prefix="rollwright-get-") as folder:
            if into is not None:
                await asyncio.to_thread(
                    (into if is_folder else into.parent).mkdir, parents=True, exist_ok=True
                )
                await self._copy(f"{self.id}:{path}{'/.' if is_folder else ''}", str(into), path)
                return b""
            copied = Path(folder) / "file"
            await self._copy(f"{self.id}:{path}", str(copied), path)
            return await asyncio.to_thread(_read_plain, copied, path)

    async def snapshot(self) -> Snapshot:
        raise BoxError(f"box: the backend {self._backend.name} cannot make a snapshot; bubblewrap can")

    async def fork(self) -> "ContainerBox":
        raise BoxError(f"box: the backend {self._backend.name} cannot fork; bubblewrap can")

    async def fork_note(self) -> str:
        return f"the backend {self._backend.name} cannot fork"

    async def change_network(self, network: Network, allowed_hosts: tuple[str, ...] = ()) -> None:
        if Network.PUBLIC in (network, self.spec.network):
            raise BoxError(
                f"the backend {self._backend.name} cannot open or close the network public of a container that runs"
            )
        await close_relays(self._relays)
        self.spec = self.spec.replace(network=network, allowed_hosts=allowed_hosts)
        self._environment, self.gateway_url = {}, ""
        await self.open_network()

    async def stop(self) -> None:
        await close_relays(self._relays)
        await self._backend.holders.end(self._line)

    async def open_network(self) -> None:
        """Opens the ways out that the spec allows; a container on a network of the engine needs none."""
        if self.spec.network is Network.GATEWAY:
            await self._serve(Relay(self._gateway), GATEWAY_PORT)
            self.gateway_url = f"http://127.0.0.1:{GATEWAY_PORT}"
        elif self.spec.network is Network.ALLOWLIST:
            await self._serve(ProxyRelay(self.spec.allowed_hosts), PROXY_PORT)
            self._environment = proxy_variables(f"http://127.0.0.1:{PROXY_PORT}")

    async def _serve(self, relay: Relay, port: int) -> None:
        code, output, _ = await self._backend.call(["inspect", "--format", "{{.State.Pid}}", self.id], 30.0)
        if code != 0 or not output.strip().isdigit():
            raise BoxError(f"{self._backend.name} inspect: says no process of {self.id}")
        call = await self._line.open_call(ListenRequest(port, int(output)))
        try:
            _, files = await call.result()
        finally:
            call.close()
        self._relays.append(relay)
        await relay.serve(socket.socket(fileno=files[0]))

    async def _copy(self, source: str, target: str, path: str) -> None:
        code, _, errors = await self._backend.call(["cp", source, target], self.spec.seconds)
        if code != 0:
            raise BoxError(f"{path}: {_last_line(errors)}")


def _bounded(content: bytes, limit: int) -> tuple[str, int]:
    kept = OutputPipe(limit)
    kept.add(content)
    return kept.text, kept.dropped


def _read_plain(file: Path, path: str) -> bytes:
    if file.is_symlink() or not file.is_file():
        raise BoxError(f"{path}: is not a file")
    return file.read_bytes()


def _last_line(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1][-_SHOWN:] if lines else "no reason was given"
