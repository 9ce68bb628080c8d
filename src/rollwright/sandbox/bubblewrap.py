"""Boxes by bubblewrap over an overlay: the default backend on Linux.

Start costs about as much as bubblewrap itself, because nothing is copied: the image is the read-only lower layer, and what
the box writes goes to a layer of its own. `fork` copies that layer. The box has namespaces of its own for users, mounts,
processes, network, IPC and host name; root in it is root there alone. What it does not promise: protection from faults of the
kernel, which it shares with this machine.

It has no network device but its loopback. The gateway, and a proxy for other hosts where its spec allows them, listen there
(`rollwright.sandbox.relay`).
"""

import asyncio
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollwright.sandbox import cgroups
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
)
from rollwright.sandbox.holder_client import HolderCall, HolderLine, HolderPool, own_process
from rollwright.sandbox.images import UnpackedImage, unpacked
from rollwright.sandbox.leases import BoxRecord, boot_id, boxes_folder, new_box_id, state_folder
from rollwright.sandbox.messages import (
    CopyRequest,
    GetRequest,
    HoldRequest,
    ListenRequest,
    PutRequest,
    RunRequest,
)
from rollwright.sandbox.relay import (
    GATEWAY_PORT,
    PROXY_PORT,
    ProxyRelay,
    Relay,
    close_relays,
    proxy_variables,
)
from rollwright.sandbox.transfer import OutputPipe, read_archive, unpack_folder, write_archive

_KILL_SECONDS = 5.0
"""Time for a command that was killed to be reported as ended."""

_OWN_PROCESSES = 3
"""Processes of a box in which no command runs: bubblewrap outside and inside, and the waiting shell."""


class BubblewrapBackend:
    """Starts boxes with bubblewrap. Belongs to one event loop."""

    name = "bubblewrap"
    features = frozenset(Feature) - {Feature.REMOTE}

    def __init__(self, *, state: str = "") -> None:
        """`state`: folder of boxes and images; empty: the user's."""
        self.state = Path(state).absolute() if state else state_folder()
        self.holders = HolderPool(self.state)
        self._inits: dict[str, int] = {}
        """First process of each box that was started here, by the box's id."""
        self._host: UnpackedImage | None = None
        self.left_open: set[OutputPipe] = set()
        """Output of programs that commands have left in the background."""

    async def find_obstacle(self) -> str:
        if sys.platform != "linux":
            return f"needs Linux, and this is {sys.platform}"
        if shutil.which("bwrap") is None:
            return "the program bwrap is missing; install the package bubblewrap"
        try:
            box = await self.start(BoxSpec(), BoxLabel(worker="doctor", lease_seconds=30.0))
        except BoxError as error:
            return str(error)
        try:
            result = await box.run("true")
        finally:
            await box.stop()
        return (
            ""
            if result.ok
            else f"a command in a box ended with {result.exit_code}: {result.stderr.strip()[:200]}"
        )

    async def start(self, spec: BoxSpec, label: BoxLabel, *, gateway: str = "") -> "BubblewrapBox":
        return await self._start(spec, label, gateway, upper="")

    async def _start(self, spec: BoxSpec, label: BoxLabel, gateway: str, upper: str) -> "BubblewrapBox":
        if shutil.which("bwrap") is None:
            raise BoxError("the program bwrap is missing; install the package bubblewrap")
        image = await self._find_image(spec)
        record = self.new_record(label, spec)
        request = HoldRequest(
            record,
            str(boxes_folder(self.state) / record.id),
            image.lower,
            upper,
            (*image.mounts, *spec.mounts),
            spec.hostname,
            spec.hosts,
            self._find_init(spec.network_of),
            spec.memory_mb << 20,
            spec.processes,
            spec.cpus,
            spec.disk_mb << 20,
        )
        line, ready = await self.holders.hold(request)
        self._inits[line.record.id] = ready.init
        box = BubblewrapBox(self, line, spec, image, gateway)
        if label.is_assigned:
            try:
                await box.open_network()
            except BaseException:
                line.drop()
                raise
        return box

    async def _find_image(self, spec: BoxSpec) -> UnpackedImage:
        """The folders of the spec's image. Those of this machine's own programs are looked up once."""
        if spec.image == HOST_IMAGE and not spec.folder and not spec.layers:
            if self._host is None:
                self._host = await asyncio.to_thread(unpacked, self.state, spec)
            return self._host
        return await asyncio.to_thread(unpacked, self.state, spec)

    def _find_init(self, box_id: str) -> int:
        if not box_id:
            return 0
        if os.geteuid() != 0:
            raise BoxError(
                "box: network_of: boxes of bubblewrap share a network only when they are started by root"
            )
        if box_id not in {each.record.id for each in self.holders.lines if not each.has_ended}:
            raise BoxError(f"box: network_of: {box_id} is not a running box of this process")
        return self._inits[box_id]

    def new_record(self, label: BoxLabel, spec: BoxSpec) -> BoxRecord:
        return BoxRecord(
            id=new_box_id(self.state),
            backend=self.name,
            label=label if label.worker else msgspec.structs.replace(label, worker=own_process()),
            image=spec.folder or spec.image,
            boot_id=boot_id(),
            holder=0,
            holder_start=0,
            created=time.time(),
        )

    async def aclose(self) -> None:
        await self.holders.close()
        for each in list(self.left_open):
            each.abandon()


class BubblewrapSnapshot:
    """Files of a box, as a layer that further boxes share."""

    def __init__(self, backend: BubblewrapBackend, line: HolderLine, spec: BoxSpec) -> None:
        self._backend = backend
        self._line = line
        self.spec = spec

    async def delete(self) -> None:
        await self._backend.holders.end(self._line)


class BubblewrapBox(RunsCommands):
    """One box of bubblewrap."""

    def __init__(
        self, backend: BubblewrapBackend, line: HolderLine, spec: BoxSpec, image: UnpackedImage, gateway: str
    ) -> None:
        self._backend = backend
        self._line = line
        self._image = image.image
        self._gateway = gateway
        self._relays: list[Relay] = []
        self._environment: dict[str, str] = {}
        self._copies = 0
        self.spec = spec
        self.gateway_url = ""

    @property
    def id(self) -> str:
        return self._line.record.id

    @property
    def label(self) -> BoxLabel:
        return self._line.record.label

    @property
    def has_ended(self) -> bool:
        return self._line.has_ended

    async def execute(self, command: BoxCommand) -> CommandResult:
        began = time.monotonic()
        output, errors = OutputPipe(command.max_output), OutputPipe(command.max_output)
        files = [_input_file(command.stdin)]
        try:
            files += [await output.open(), await errors.open()]
            call = await self.begin(command, files)
        except BaseException:
            output.close()
            errors.close()
            raise
        finally:
            for each in files:
                os.close(each)
        is_late = False
        try:
            try:
                async with asyncio.timeout(command.seconds or self.spec.seconds):
                    done, _ = await call.result()
            except TimeoutError:
                is_late = True
                call.give_up()
                async with asyncio.timeout(_KILL_SECONDS):
                    done, _ = await call.result()
            texts = await asyncio.gather(output.finish(), errors.finish())
            for pipe in (output, errors):
                pipe.leave_to(self._backend.left_open)
        except TimeoutError:
            raise BoxError("a command could not be killed") from None
        finally:
            call.close()
            output.close()
            errors.close()
        dropped = output.dropped + errors.dropped
        return CommandResult(done.exit_code, *texts, is_late, dropped, time.monotonic() - began)

    async def begin(self, command: BoxCommand, files: Sequence[int]) -> HolderCall:
        """Starts a command whose input, output and errors are the given files, which the caller closes."""
        given = command.command
        request = RunRequest(
            ("", given) if isinstance(given, str) else tuple(given),
            {**self._image.environment, **self._environment, **self.spec.environment, **command.environment},
            command.workdir or self.spec.workdir or self._image.workdir or "/",
            command.user or self.spec.user or self._image.user or "0",
        )
        return await self._line.open_call(request, files)

    async def put(self, source: bytes | Path, path: str) -> None:
        _check_path(path)
        reading, writing = os.pipe()
        request = PutRequest(unpack_folder(path, source))
        await self._transfer(request, reading, lambda: _write(source, path, writing), writing)

    async def get(self, path: str, into: Path | None = None) -> bytes:
        _check_path(path)
        reading, writing = os.pipe()
        return await self._transfer(GetRequest(path), writing, lambda: _read(path, into, reading), reading)

    async def snapshot(self) -> BubblewrapSnapshot:
        record = self._backend.new_record(self.label, self.spec)
        folder = boxes_folder(self._backend.state) / record.id
        line, _ = await self._backend.holders.hold(HoldRequest(record, str(folder)))
        try:
            await self._copy_layer(folder / "files")
        except BaseException:
            line.drop()
            raise
        spec = self.spec.replace(layers=(str(folder / "files"), *self.spec.layers))
        return BubblewrapSnapshot(self._backend, line, spec)

    async def fork(self) -> "BubblewrapBox":
        self._copies += 1
        copied = self._line.folder / f"fork-{self._copies}"
        await self._copy_layer(copied)
        return await self._backend._start(self.spec, self.label, self._gateway, upper=str(copied))

    async def fork_note(self) -> str:
        running = len(cgroups.processes_in(cgroups.group_folders(self.id)[:1])) - _OWN_PROCESSES
        return f"files only: {running} processes that run in the box are not copied" if running > 0 else ""

    async def assign(self, label: BoxLabel, gateway: str) -> None:
        self._gateway = gateway
        await asyncio.to_thread(self._line.relabel, label)
        await self.open_network()

    async def change_network(self, network: Network, allowed_hosts: tuple[str, ...] = ()) -> None:
        await close_relays(self._relays)
        self.spec = self.spec.replace(network=network, allowed_hosts=allowed_hosts)
        self._environment, self.gateway_url = {}, ""
        await self.open_network()

    async def stop(self) -> None:
        await close_relays(self._relays)
        await self._backend.holders.end(self._line)
        self._backend._inits.pop(self.id, None)

    async def open_network(self) -> None:
        """Opens the ways out that the spec allows."""
        match self.spec.network:
            case Network.GATEWAY:
                if not self._gateway:
                    raise BoxError(
                        "network gateway: this attempt has none; accepted: none, allowlist, public"
                    )
                await self._serve(Relay(self._gateway), GATEWAY_PORT)
                self.gateway_url = f"http://127.0.0.1:{GATEWAY_PORT}"
            case Network.ALLOWLIST | Network.PUBLIC:
                is_public = self.spec.network is Network.PUBLIC
                await self._serve(ProxyRelay(None if is_public else self.spec.allowed_hosts), PROXY_PORT)
                self._environment = proxy_variables(f"http://127.0.0.1:{PROXY_PORT}")
                if self._gateway:
                    await self._serve(Relay(self._gateway), GATEWAY_PORT)
                    self.gateway_url = f"http://127.0.0.1:{GATEWAY_PORT}"
            case Network.NONE:
                pass

    async def _serve(self, relay: Relay, port: int) -> None:
        call = await self._line.open_call(ListenRequest(port))
        try:
            _, files = await call.result()
        finally:
            call.close()
        self._relays.append(relay)
        await relay.serve(socket.socket(fileno=files[0]))

    async def _copy_layer(self, into: Path) -> None:
        call = await self._line.open_call(CopyRequest(str(into)))
        try:
            await call.result()
        finally:
            call.close()

    async def _transfer(self, request: PutRequest | GetRequest, theirs: int, work, own: int) -> bytes:  # type: ignore[no-untyped-def]
        try:
            call = await self._line.open_call(request, [theirs])
        except BaseException:
            os.close(own)
            raise
        finally:
            os.close(theirs)
        try:
            moving = asyncio.create_task(asyncio.to_thread(work))
            async with asyncio.timeout(self.spec.seconds):
                done, _ = await call.result()
                moved: bytes = await moving
        except TimeoutError:
            raise BoxError(f"{request.path}: was not copied within {self.spec.seconds:g} s") from None
        finally:
            call.close()
            moving.add_done_callback(_ignore)
        if done.exit_code != 0:
            raise BoxError(f"{request.path}: could not be copied")
        return moved


def _check_path(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise BoxError(f"a path in a box is absolute, got {path!r}")


def _input_file(content: bytes) -> int:
    if not content:
        return os.open(os.devnull, os.O_RDONLY)
    file = os.memfd_create("stdin")
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _write(source: bytes | Path, path: str, file: int) -> bytes:
    try:
        with os.fdopen(file, "wb") as stream:
            write_archive(source, path, stream)
    except BrokenPipeError:
        pass  # the box says why
    return b""


def _read(path: str, into: Path | None, file: int) -> bytes:
    with os.fdopen(file, "rb") as stream:
        return read_archive(stream, path, into)


def _ignore(task: "asyncio.Task[bytes]") -> None:
    if not task.cancelled():
        task.exception()
