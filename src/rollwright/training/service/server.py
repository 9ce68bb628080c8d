"""The batch service over HTTP, in a thread with an event loop of its own.

Always true: a request without the token is refused before its body is read; without a token the server can only be reached
from its own machine, and by no web page. Bodies of calls are small; uploads go to the disk as they come.
"""

import asyncio
import hmac
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from rollwright.http.server import Listener, guarded_socket, server_url
from rollwright.training.service.service import BatchService
from rollwright.training.service.wire import (
    CALLS,
    JSON,
    MSGPACK,
    Refusal,
    RefusedBody,
    decode,
    document,
    encode,
)

MAX_CALL = 1 << 20
"""Bytes of a call: names, checksums and metrics."""

T = TypeVar("T")


class BatchServer:
    """Serves from `start` to `stop`; `url` says where."""

    def __init__(self, make: Callable[[], BatchService], *, host: str, port: int, token: str | None) -> None:
        """`make` makes the service, in the server's own thread."""
        self._make, self._token = make, token
        self._socket = guarded_socket(host, port, token)
        self.url = server_url(host, self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="batch-server", daemon=True)
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._service: BatchService | None = None
        self._listener: Listener | None = None

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    @property
    def service(self) -> BatchService:
        assert self._service is not None, "made by `start`"
        return self._service

    def submit(self, work: Coroutine[Any, Any, T]) -> "Any":
        """Runs a coroutine in the server's loop; returns its future of `concurrent.futures`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """Answers waiting trainers, and returns when the server has ended."""
        if not self._thread.is_alive():
            return
        assert self._listener is not None
        self.submit(self.service.close()).result()
        self._loop.call_soon_threadsafe(self._listener.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        except BaseException as error:  # noqa: BLE001 - told by `start` in the thread that asked
            self._error = error
        finally:
            self._loop.close()
            self._ready.set()

    async def _run(self) -> None:
        self._service = self._make()
        self._listener = Listener(build_batch_app(self._service, self._token))
        self._loop.call_soon(self._ready.set)
        await self._listener.serve([self._socket])


def build_batch_app(service: BatchService, token: str | None) -> Starlette:
    """The web app. Without a token it must only be served on loopback, as `BatchServer` ensures."""

    def guarded(
        handle: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                _admit(request, token)
                return await handle(request)
            except Refusal as error:
                body = encode(RefusedBody(error.kind, " ".join(str(error).split())), _wanted(request))
                closed = {"connection": "close"} if error.status in (401, 413) else {}
                return Response(body, error.status, closed, _wanted(request))

        return answer

    async def call(request: Request) -> Response:
        name = request.path_params["call"]
        if name not in CALLS:
            raise Refusal(404, "no_such_call", f"no call {name[:80]!r}; accepted: {', '.join(CALLS)}")
        sent = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if sent not in (JSON, MSGPACK):
            raise Refusal(415, "media_type", f"Content-Type is not one of {JSON}, {MSGPACK}")
        asked = decode(await _body(request), CALLS[name][0], sent)
        found = await getattr(service, name)(asked)
        # A batch of a million tokens takes a second to encode.
        content = await asyncio.to_thread(encode, found, _wanted(request))
        return Response(content, media_type=_wanted(request))

    async def status(request: Request) -> Response:
        return Response(encode(await service.status(), _wanted(request)), media_type=_wanted(request))

    async def weights(request: Request) -> Response:
        return Response(encode(await service.weights(), _wanted(request)), media_type=_wanted(request))

    async def download(request: Request) -> Response:
        return FileResponse(service.weights_file(request.path_params["name"]))

    async def upload(request: Request) -> Response:
        lease, name = request.path_params["lease"], request.path_params["name"]
        found = await service.upload(lease, name, request.stream())
        return Response(encode(found, _wanted(request)), media_type=_wanted(request))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def described(_: Request) -> Response:
        return JSONResponse(document())

    app = Starlette(
        routes=[
            Route("/v1/status", guarded(status), methods=["GET"]),
            Route("/v1/weights", guarded(weights), methods=["GET"]),
            Route("/v1/weights/{name}", guarded(download), methods=["GET"]),
            Route("/v1/uploads/{lease}/{name}", guarded(upload), methods=["PUT"]),
            Route("/v1/{call}", guarded(call), methods=["POST"]),
            Route("/health", health, methods=["GET"]),
            Route("/openapi.json", described, methods=["GET"]),
        ]
    )
    app.router.redirect_slashes = False
    return app


def _admit(request: Request, token: str | None) -> None:
    if token is None:
        if "origin" in request.headers:
            # Otherwise any web page open on this machine could call a server without a token.
            raise Refusal(403, "forbidden", "a server without a token takes no calls from web pages")
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise Refusal(
            401, "unauthorized", "the token is missing or wrong: send Authorization: Bearer <token>"
        )


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    stream: AsyncIterator[bytes] = request.stream()
    async for part in stream:
        size += len(part)
        if size > MAX_CALL:
            raise Refusal(413, "too_large", f"the body is longer than {MAX_CALL} bytes")
        parts.append(part)
    return b"".join(parts)


def _wanted(request: Request) -> str:
    return MSGPACK if MSGPACK in request.headers.get("accept", "") else JSON
