"""A small E2B service whose sandboxes are bubblewrap boxes, for machines without an account.

It speaks the part of the real protocol that boxes need: the REST API for sandboxes (keys, templates, timeouts, metadata) and
the processes of `envd`, the daemon in a sandbox, as Connect calls by the service definition that comes with E2B's own client.
As with the real service, a sandbox ends at its timeout, and one that does not exist is answered by the proxy with 502.
"""

import asyncio
import base64
import itertools
import secrets
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from rollwright.http.server import Listener, listening_socket
from rollwright.sandbox.box import BoxCommand, BoxError, BoxLabel, BoxSpec
from rollwright.sandbox.bubblewrap import BubblewrapBackend, BubblewrapBox
from rollwright.simulation.box_process import STDOUT, BoxProcess

ENVD_VERSION = "0.6.6"


class SimulatedSandbox:
    """One sandbox."""

    def __init__(self, template: str, box: BubblewrapBox, body: Mapping[str, Any]) -> None:
        self.id = f"i{secrets.token_hex(10)}"
        self.token = secrets.token_hex(16)
        self.template = template
        self.box = box
        self.metadata: Mapping[str, str] = body.get("metadata") or {}
        self.environment: Mapping[str, str] = body.get("envVars") or {}
        self.has_internet = body.get("allow_internet_access", True) is not False
        self.started = datetime.now(UTC)
        self.ends = self.started
        self.processes: dict[int, BoxProcess] = {}
        self.ending: asyncio.TimerHandle | None = None

    @property
    def details(self) -> dict[str, Any]:
        return {
            "templateID": self.template,
            "sandboxID": self.id,
            "clientID": "simulated",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token,
            "startedAt": self.started.isoformat(),
            "endAt": self.ends.isoformat(),
            "cpuCount": 2,
            "memoryMB": self.box.spec.memory_mb,
            "diskSizeMB": 512,
            "state": "running",
            "metadata": dict(self.metadata),
        }


class SimulatedE2B:
    """The service. Belongs to one event loop."""

    def __init__(self, templates: Mapping[str, BoxSpec], *, state: Path) -> None:
        """`templates`: what a sandbox of each template is made of."""
        self._templates = templates
        self._backend = BubblewrapBackend(state=str(state))
        self.key = f"e2b_{secrets.token_hex(20)}"
        self.url = ""
        self.sandboxes: dict[str, SimulatedSandbox] = {}
        self._serving: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        envd = process_connect.ProcessASGIApplication(_Envd(self))
        app = Starlette(
            routes=[
                Route("/v2/sandboxes", self._create, methods=["POST"]),
                Route("/v2/sandboxes", self._list, methods=["GET"]),
                Route("/sandboxes/{id}", self._kill, methods=["DELETE"]),
                Route("/sandboxes/{id}/timeout", self._set_timeout, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Mount("/", envd),
            ]
        )
        self._listener = Listener(app)
        bound = listening_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self._serving = asyncio.create_task(self._listener.serve([bound]))

    async def close(self) -> None:
        for each in list(self.sandboxes.values()):
            await self.end(each)
        if self._listener is not None and self._serving is not None:
            self._listener.stop()
            await self._serving
        await self._backend.aclose()

    async def end(self, sandbox: SimulatedSandbox) -> None:
        if self.sandboxes.pop(sandbox.id, None) is None:
            return
        if sandbox.ending is not None:
            sandbox.ending.cancel()
        for process in sandbox.processes.values():
            await process.close()
        await sandbox.box.stop()

    def set_timeout(self, sandbox: SimulatedSandbox, seconds: float) -> None:
        """Has the sandbox end so many seconds from now."""
        if sandbox.ending is not None:
            sandbox.ending.cancel()
        sandbox.ends = datetime.now(UTC) + timedelta(seconds=seconds)

        def end() -> None:
            task = asyncio.create_task(self.end(sandbox))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

        sandbox.ending = asyncio.get_running_loop().call_later(seconds, end)

    def find(self, headers: Mapping[str, str]) -> SimulatedSandbox:
        """The sandbox of a request to its daemon."""
        found = self.sandboxes.get(headers.get("e2b-sandbox-id", ""))
        if found is None:
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        if headers.get("x-access-token") != found.token:
            raise ConnectError(Code.UNAUTHENTICATED, "invalid access token")
        return found

    def _refuse(self, request: Request) -> Response | None:
        if request.headers.get("x-api-key") == self.key:
            return None
        return _error(401, "Invalid API key")

    async def _create(self, request: Request) -> Response:
        if (refused := self._refuse(request)) is not None:
            return refused
        body = await request.json()
        spec = self._templates.get(body["templateID"])
        if spec is None:
            return _error(404, f"template '{body['templateID']}' not found")
        try:
            box = await self._backend.start(spec, BoxLabel(worker="e2b", lease_seconds=60.0))
        except BoxError as error:
            return _error(500, f"Failed to start sandbox: {error}")
        sandbox = SimulatedSandbox(body["templateID"], box, body)
        self.sandboxes[sandbox.id] = sandbox
        self.set_timeout(sandbox, body.get("timeout", 15))
        return JSONResponse(sandbox.details, 201)

    async def _list(self, request: Request) -> Response:
        refused = self._refuse(request)
        return refused or JSONResponse([each.details for each in self.sandboxes.values()])

    async def _kill(self, request: Request) -> Response:
        if (refused := self._refuse(request)) is not None:
            return refused
        sandbox = self.sandboxes.get(request.path_params["id"])
        if sandbox is None:
            return _error(404, "sandbox not found")
        await self.end(sandbox)
        return Response(status_code=204)

    async def _set_timeout(self, request: Request) -> Response:
        if (refused := self._refuse(request)) is not None:
            return refused
        sandbox = self.sandboxes.get(request.path_params["id"])
        if sandbox is None:
            return _error(404, "sandbox not found")
        self.set_timeout(sandbox, (await request.json())["timeout"])
        return Response(status_code=204)

    async def _health(self, request: Request) -> Response:
        if request.headers.get("e2b-sandbox-id", "") in self.sandboxes:
            return Response(status_code=204)
        return JSONResponse({"sandboxId": "", "message": "The sandbox was not found", "code": 502}, 502)


class _Envd(process_connect.Process):
    """Processes in sandboxes, as `process.Process` of E2B defines them."""

    def __init__(self, service: SimulatedE2B) -> None:
        self._service = service
        self._numbers = itertools.count(1000)

    async def start(
        self, request: process_pb.StartRequest, context: Any
    ) -> AsyncIterator[process_pb.StartResponse]:
        headers = context.request_headers
        sandbox, config = self._service.find(headers), request.process
        if config is None:
            raise ConnectError(Code.INVALID_ARGUMENT, "process is required")
        user = _user(headers)
        try:
            await sandbox.box.run(["true"], user=user)
        except BoxError as error:
            raise ConnectError(Code.UNAUTHENTICATED, f"invalid username: '{user}'") from error
        try:
            process = await BoxProcess.start(
                sandbox.box,
                BoxCommand(
                    command=[config.cmd, *config.args],
                    user=user,
                    environment={**sandbox.environment, **config.envs},
                    workdir=config.cwd or None,
                ),
                has_input=request.stdin,
            )
        except BoxError as error:
            raise ConnectError(Code.UNAVAILABLE, str(error)) from error
        number = next(self._numbers)
        sandbox.processes[number] = process
        has_ended = False
        try:
            yield _event("start", process_pb.ProcessEvent.StartEvent(pid=number))
            while (piece := await process.read()) is not None:
                name = "stdout" if piece[0] == STDOUT else "stderr"
                output: Any = Oneof(name, piece[1])
                yield _event("data", process_pb.ProcessEvent.DataEvent(output=output))
            code = await process.wait()
            has_ended, status = True, f"exit status {code}"
            yield _event("end", process_pb.ProcessEvent.EndEvent(exit_code=code, exited=True, status=status))
        except BoxError as error:
            raise ConnectError(Code.UNAVAILABLE, "the connection to the sandbox ended") from error
        finally:
            if has_ended:
                sandbox.processes.pop(number, None)
                await process.close()
            else:
                process.leave()  # a client that disconnects does not end the program

    async def send_input(
        self, request: process_pb.SendInputRequest, context: Any
    ) -> process_pb.SendInputResponse:
        given = request.input.input if request.input is not None else None
        if given is not None:
            await self._find(request.process, context).write(given.value)
        return process_pb.SendInputResponse()

    async def close_stdin(
        self, request: process_pb.CloseStdinRequest, context: Any
    ) -> process_pb.CloseStdinResponse:
        self._find(request.process, context).close_input()
        return process_pb.CloseStdinResponse()

    async def send_signal(
        self, request: process_pb.SendSignalRequest, context: Any
    ) -> process_pb.SendSignalResponse:
        await self._find(request.process, context).close()
        return process_pb.SendSignalResponse()

    async def list(self, request: process_pb.ListRequest, context: Any) -> process_pb.ListResponse:
        running = self._service.find(context.request_headers).processes
        return process_pb.ListResponse(processes=[process_pb.ProcessInfo(pid=each) for each in running])

    def connect(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise ConnectError(Code.UNIMPLEMENTED, "connect")

    async def update(self, request: Any, context: Any) -> Any:
        raise ConnectError(Code.UNIMPLEMENTED, "update")

    async def stream_input(self, request: Any, context: Any) -> Any:
        raise ConnectError(Code.UNIMPLEMENTED, "stream_input")

    def _find(self, selector: Any, context: Any) -> BoxProcess:
        sandbox = self._service.find(context.request_headers)
        found = sandbox.processes.get(selector.selector.value) if selector is not None else None
        if found is None:
            raise ConnectError(Code.NOT_FOUND, "process not found")
        return found


def _event(kind: str, value: Any) -> process_pb.StartResponse:
    event: Any = Oneof(kind, value)
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=event))


def _user(headers: Mapping[str, str]) -> str | None:
    """The user of a request; none: the template's own."""
    kind, _, encoded = headers.get("authorization", "").partition(" ")
    return base64.b64decode(encoded).decode().partition(":")[0] or None if kind == "Basic" else None


def _error(code: int, message: str) -> Response:
    return JSONResponse({"code": code, "message": message}, code)
