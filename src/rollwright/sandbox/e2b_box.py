"""Boxes as sandboxes of E2B, a hosted service, through its PyPI client `e2b`.

Commands, files and the gateway go through the processes that the service starts (`rollwright.sandbox.shell_box`), so a sandbox
needs no address of this machine. The image of a spec is the name or id of an E2B template, which also sets its memory and
cores; `memory_mb`, `cpus`, `processes` and `disk_mb` have no effect.

Always true, whatever is killed: the service ends a sandbox whose timeout has passed, and the timeout is the lease of the box,
which this process sets again while it lives. A sandbox is labelled by its metadata.
"""

import asyncio
import logging
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollwright.sandbox.box import HOST_IMAGE, BoxError, BoxLabel, BoxSpec, Feature, Network
from rollwright.sandbox.holder_client import HolderLine, HolderPool, own_process
from rollwright.sandbox.leases import BoxRecord, boot_id, boxes_folder, new_box_id, state_folder
from rollwright.sandbox.messages import HoldRequest
from rollwright.sandbox.shell_box import STDERR, STDOUT, ShellBox, ShellStream

BOX_METADATA = "rollwright_box"
MISSING = 'the package e2b is missing; pip install "rollwright[e2b]"'
KEY_VARIABLE = "E2B_API_KEY"

_RENEWALS_PER_LEASE = 4
_log = logging.getLogger(__name__)


class E2BBackend:
    """Starts sandboxes of E2B. Belongs to one event loop."""

    name = "e2b"
    features = frozenset({Feature.COMMANDS, Feature.IMAGES, Feature.GATEWAY, Feature.NETWORK, Feature.REMOTE})

    def __init__(
        self,
        *,
        api_url: str = "",
        sandbox_url: str = "",
        domain: str = "",
        http_version: str = "",
        request_seconds: float = 60.0,
        state: str = "",
    ) -> None:
        """The key is read from `E2B_API_KEY`. `domain`, or `api_url` and `sandbox_url`: of a service of your own. `state`: folder of
        the records of boxes; empty: the user's."""
        self.state = Path(state).absolute() if state else state_folder()
        self.holders = HolderPool(self.state)
        self.boxes: set[E2BBox] = set()
        """Boxes that run, started here."""
        given = {
            "api_url": api_url,
            "sandbox_url": sandbox_url,
            "domain": domain,
            "http_version": http_version,
        }
        self._place: dict[str, Any] = {key: value for key, value in given.items() if value}
        self._place["request_timeout"] = request_seconds

    async def find_obstacle(self) -> str:
        try:
            sandbox_class = _client()
            listing = sandbox_class.list(limit=1, **self._place)
            await _call(listing.next_items(), "list sandboxes")
        except BoxError as error:
            return str(error)
        return ""

    async def start(self, spec: BoxSpec, label: BoxLabel, *, gateway: str = "") -> "E2BBox":
        _check(spec, gateway)
        sandbox_class = _client()
        label = label if label.worker else msgspec.structs.replace(label, worker=own_process())
        record = BoxRecord(
            id=new_box_id(self.state, is_remote=True),
            backend=self.name,
            label=label,
            image=spec.image,
            boot_id=boot_id(),
            holder=0,
            holder_start=0,
            created=time.time(),
        )
        line, _ = await self.holders.hold(HoldRequest(record, str(boxes_folder(self.state) / record.id)))
        try:
            sandbox = await _call(
                sandbox_class.create(
                    spec.image,
                    timeout=_lease(label),
                    metadata={
                        BOX_METADATA: record.id,
                        "rollout_id": label.rollout_id,
                        "attempt_id": label.attempt_id,
                        "worker": label.worker,
                    },
                    allow_internet_access=spec.network is Network.PUBLIC,
                    **self._place,
                ),
                f"a box did not start: template {spec.image}",
            )
        except BaseException:
            line.drop()
            raise
        box = E2BBox(self, sandbox, line, spec, gateway)
        try:
            await box.open_network()
        except BaseException:
            await box.stop()
            raise
        self.boxes.add(box)
        return box

    async def aclose(self) -> None:
        await asyncio.gather(*(each.stop() for each in list(self.boxes)), return_exceptions=True)
        await self.holders.close()


class E2BBox(ShellBox):
    """One sandbox of E2B as a box."""

    backend_name = "e2b"
    root_user = "root"

    def __init__(
        self, backend: E2BBackend, sandbox: Any, line: HolderLine, spec: BoxSpec, gateway: str
    ) -> None:
        super().__init__(spec, gateway)
        self._backend = backend
        self._sandbox = sandbox
        self._line = line
        self._is_gone = False
        self._renewing = asyncio.create_task(self._renew())

    @property
    def id(self) -> str:
        return self._line.record.id

    @property
    def sandbox_id(self) -> str:
        return str(self._sandbox.sandbox_id)

    @property
    def has_ended(self) -> bool:
        return self._is_gone or self._line.has_ended

    async def _renew(self) -> None:
        label = self._line.record.label
        while not self.has_ended:
            await asyncio.sleep(label.lease_seconds / _RENEWALS_PER_LEASE)
            try:
                await _call(self._sandbox.set_timeout(_lease(label)), "set timeout")
            except SandboxGone:
                self._is_gone = True
            except BoxError as error:
                _log.warning("box %s: its lease could not be renewed: %s", self.id, error)

    async def _start_shell(self, program: str, user: str) -> ShellStream:
        stream = _ProcessStream()
        try:
            handle = await _call(
                self._sandbox.commands.run(
                    program,
                    background=True,
                    stdin=True,
                    user=user or None,
                    on_stdout=lambda text: stream.add(STDOUT, text),
                    on_stderr=lambda text: stream.add(STDERR, text),
                    timeout=0,
                    retain_output=False,
                ),
                "start a command",
            )
        except SandboxGone:
            self._is_gone = True
            raise BoxError("the box has ended") from None
        stream.follow(handle)
        return stream

    async def _end(self) -> None:
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        if not self._is_gone:
            with suppress(BoxError):  # then its timeout ends it
                await _call(self._sandbox.kill(), "kill")
        await self._backend.holders.end(self._line)
        self._backend.boxes.discard(self)


class _ProcessStream:
    """A process of a sandbox. The client decodes output as UTF-8; `ShellBox` sends nothing through it that would suffer."""

    def __init__(self) -> None:
        self._received: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._handle: Any = None
        self._ending: asyncio.Task[None] | None = None

    def add(self, channel: int, text: str) -> None:
        self._received.put_nowait((channel, text.encode()))

    def follow(self, handle: Any) -> None:
        self._handle = handle
        self._ending = asyncio.create_task(self._wait())

    async def send(self, data: bytes) -> None:
        await _call(self._handle.send_stdin(data), "send input")

    async def receive(self) -> tuple[int, bytes] | None:
        return await self._received.get()

    async def close(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)
        await self._handle.disconnect()

    async def _wait(self) -> None:
        try:
            await self._handle.wait()
        except Exception as error:  # noqa: BLE001 - an exit code, a lost stream and a lost sandbox are all raised, some plainly
            _log.debug("a command of E2B ended: %s", error)
        finally:
            self._received.put_nowait(None)


class SandboxGone(BoxError):
    """The service knows no such sandbox any more."""


async def _call(request: Any, what: str) -> Any:
    """Awaits a request; its failure is one line."""
    import httpx
    from connectrpc.errors import ConnectError
    from e2b import exceptions

    try:
        return await request
    except (exceptions.SandboxNotFoundException, exceptions.SandboxNotRunningException) as error:
        raise SandboxGone(f"e2b: {what}: {_line(error)}") from error
    except (
        exceptions.SandboxException,
        exceptions.AuthenticationException,
        exceptions.ServiceBusyException,
        ConnectError,
        httpx.HTTPError,
        OSError,
    ) as error:
        raise BoxError(f"e2b: {what}: {_line(error)}") from error


def _client() -> Any:
    try:
        from e2b import AsyncSandbox
    except ModuleNotFoundError as error:
        raise BoxError(MISSING) from error
    if not os.environ.get(KEY_VARIABLE):
        raise BoxError(f"{KEY_VARIABLE} is not set; it holds the key of your E2B account")
    return AsyncSandbox


def _lease(label: BoxLabel) -> int:
    """The service counts whole seconds."""
    return max(1, math.ceil(label.lease_seconds))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check(spec: BoxSpec, gateway: str) -> None:
    if spec.image == HOST_IMAGE or spec.folder or spec.layers:
        raise BoxError(
            "box: the backend e2b needs an image, the name of a template; bubblewrap starts from the host or a folder"
        )
    for name in ("mounts", "network_of"):
        if getattr(spec, name):
            raise BoxError(f"box: {name}: the backend e2b does not have it; bubblewrap does")
    if spec.network is Network.GATEWAY and not gateway:
        raise BoxError("network gateway: this attempt has none; accepted: none, allowlist, public")
