"""The store's server: any store over HTTP, on a port or on a Unix socket.

Always true: a server without a token can only be reached from its own machine, on a Unix socket only by its own user;
when it stops, waiting calls end at once and the others are answered first. The store stays open: its creator closes it.
"""

import asyncio
import signal
import socket
from pathlib import Path
from types import TracebackType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollwright.errors import ConfigError
from rollwright.http.server import BACKLOG, Listener, guarded_socket, server_url
from rollwright.http.server_limits import ServerLimits
from rollwright.store.api import Store
from rollwright.store.http import openapi
from rollwright.store.http.endpoint import MAX_BODY, CallEndpoint

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_SOCKET_MODE = 0o600
"""Only the user who runs the server may connect."""


_CALLS = "/v1/"
"""Path prefix of the calls."""


class StoreApp(Starlette):
    """The web app, with an OpenAPI document generated from the call records."""

    def __init__(self, endpoint: CallEndpoint) -> None:
        super().__init__(
            routes=[
                Route(f"{_CALLS}{{call}}", endpoint, methods=["POST"]),
                Route("/health", _health, methods=["GET"]),
                Route("/openapi.json", _openapi, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _refuse},
        )
        self.router.redirect_slashes = False
        self.endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A call goes straight to its endpoint: route matching and the middleware around it, which catches what the
        endpoint never raises, would double its cost."""
        path = scope.get("path", "")
        name = path.removeprefix(_CALLS)
        if path != name and name and "/" not in name and scope.get("method") == "POST":
            scope["path_params"] = {"call": name}
            await self.endpoint(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def build_app(store: Store, token: str | None = None, max_body: int = MAX_BODY) -> StoreApp:
    """The ASGI app over any store. Without a token it must only be served on loopback, as `serve` ensures."""
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise ConfigError("token: is empty or holds a character that no HTTP header can carry")
    return StoreApp(CallEndpoint(store, token, max_body))


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi.document())


async def _refuse(request: Request, error: Exception) -> Response:
    """Replies to an unknown path or method."""
    assert isinstance(error, HTTPException)
    body = {"kind": "no_such_call", "message": f"{request.method} {request.url.path[:80]}: {error.detail}"}
    return JSONResponse(body, error.status_code, error.headers)


class StoreServer:
    """Listens from the start on `host` and `port` (0: any free one), or on the Unix socket `path`; `url` says where.

    Serves for the length of an `async with` block, or while `run` lasts.
    """

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: Path | str | None = None,
        token: str | None = None,
        max_body: int = MAX_BODY,
        limits: ServerLimits | None = None,
        handle_signals: bool = False,
    ) -> None:
        """`handle_signals`: SIGINT and SIGTERM stop it; only in the main thread."""
        self._server = _Server(build_app(store, token, max_body), limits)
        self._handle_signals = handle_signals
        self._path = None if path is None else Path(path).absolute()
        if self._path is not None:
            self._socket = _unix_socket(self._path)
            self._socket.listen(BACKLOG)
            self.url = f"http+unix://{self._path}"
        else:
            self._socket = guarded_socket(host, port, token)
            self.url = server_url(host, self._socket.getsockname()[1])
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serves until it is stopped or cancelled. Then waiting calls end and the others are answered."""
        loop = asyncio.get_running_loop()
        signals = _STOP_SIGNALS if self._handle_signals else ()
        for each in signals:
            loop.add_signal_handler(each, self.stop)
        serving = asyncio.create_task(self._server.serve([self._socket]))
        try:
            await asyncio.shield(serving)
        finally:
            self.stop()
            await serving
            for each in signals:
                loop.remove_signal_handler(each)
            if self._path is not None:
                self._path.unlink(missing_ok=True)

    def stop(self) -> None:
        self._server.stop()

    async def __aenter__(self) -> "StoreServer":
        self._running = asyncio.create_task(self.run(), name="store-server")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._running is not None
        self.stop()
        await self._running


async def serve(
    store: Store,
    host: str = "127.0.0.1",
    port: int = 8700,
    token: str | None = None,
    *,
    path: Path | str | None = None,
    max_body: int = MAX_BODY,
) -> None:
    """Serves until SIGINT or SIGTERM, then answers requests in flight and returns. For the main thread."""
    server = StoreServer(
        store, host=host, port=port, path=path, token=token, max_body=max_body, handle_signals=True
    )
    await server.run()


class _Server(Listener):
    def __init__(self, app: StoreApp, limits: ServerLimits | None) -> None:
        super().__init__(app, limits)
        self._endpoint = app.endpoint

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._endpoint.stop_waiting()
        await super().shutdown(sockets)


def _unix_socket(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()  # left behind by a server that was killed
        bound.bind(str(path))
        path.chmod(_SOCKET_MODE)  # nobody can connect yet: it does not listen
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
    bound.setblocking(False)
    return bound


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
