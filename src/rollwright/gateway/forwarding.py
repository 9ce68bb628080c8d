"""Requests for rollouts that another gateway holds, passed on to it.

Always true: a request is passed on once, unchanged but for the headers of its connection, and its answer comes back whole;
a client that disconnects takes the passed-on request with it, so that the other gateway knows that its answer reached
nobody; a rollout that has moved on refuses its earlier clients, also those that wait.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

import msgspec

from rollwright.gateway.endpoint import Administration, GatewayApp, Scope, Send, send_json
from rollwright.gateway.recorder import OVER
from rollwright.gateway.registry import RolloutRegistry
from rollwright.gateway.requests import RequestHead
from rollwright.http.client import HttpClient
from rollwright.http.connection import HttpFault, HttpResponse
from rollwright.http.url import Url
from rollwright.store.http.body import Body, Gone, Receive
from rollwright.store.http.errors import HttpRefusal

Headers = Sequence[tuple[bytes, bytes]]

_SENT = frozenset(
    {
        b"authorization",
        b"x-api-key",
        b"content-type",
        b"idempotency-key",
        b"x-stainless-retry-count",
        b"x-rollwright-agent",
    }
)
"""Headers of a request that mean something to a gateway."""

_ANSWERED = frozenset({b"content-type", b"cache-control", b"x-rollwright-note", b"x-should-retry"})
"""Headers of a gateway's answer that mean something to a client."""

_CALL_SECONDS = 24 * 3600.0
"""For a passed-on request: how long an answer may take is decided where the rollout is played."""

_CONTROL_SECONDS = 10.0
"""For requests of gateways to each other, which wait for nothing."""

_KEEP_SECONDS = 30.0
"""Less than a gateway keeps an idle connection."""


@dataclass(eq=False)
class RolloutRoute:
    """Where an open rollout is played."""

    address: str
    """Of the gateway that holds it."""
    key: bytes
    """The rollout's own."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the rollout is not played there any more."""


class Routing(Protocol):
    """Knows which rollouts are held by other gateways."""

    def find_route(self, rollout_id: str, key: bytes | None) -> RolloutRoute | None:
        """`None`: the rollout, or this key of it, is none of theirs."""
        ...

    def admit_worker(self, key: bytes | None) -> None:
        """Raises unless the key belongs to a worker of the run."""
        ...

    async def announce(self, body: bytes) -> Mapping[str, Any]:
        """Takes what the gateway of a worker offers."""
        ...

    async def note_fault(self, route: RolloutRoute) -> None:
        """A request did not reach the end of the route; drops the route if nothing is there any more."""
        ...


class ForwardedRequest(NamedTuple):
    """A request as it came in."""

    method: str
    target: str
    """Path and query."""
    headers: Headers
    body: bytes


class Forwarder:
    """Sends requests to other gateways. Belongs to one event loop."""

    def __init__(self) -> None:
        self._client = HttpClient({}, keep_alive=_KEEP_SECONDS)

    async def pass_on(
        self, request: ForwardedRequest, route: RolloutRoute, gone: "asyncio.Future[Any]"
    ) -> HttpResponse | None:
        """The answer of the route's gateway; `None`: the client has left first. Raises an `HttpFault` if there is none."""
        lines = "".join(
            f"{name.decode('latin-1')}: {value.decode('latin-1')}\r\n"
            for name, value in request.headers
            if name in _SENT
        )
        body = None if request.method == "GET" else request.body
        asking = asyncio.ensure_future(
            self._client.request(
                request.method,
                Url.parse(route.address + request.target),
                body,
                _CALL_SECONDS,
                header_lines=lines,
            )
        )
        moved = asyncio.ensure_future(route.moved.wait())
        try:
            await asyncio.wait({asking, moved, gone}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            if moved.done():
                raise HttpRefusal(410, "sealed", OVER)
            return None
        finally:
            moved.cancel()
            asking.cancel()
            await asyncio.gather(asking, moved, return_exceptions=True)

    async def post(
        self, url: str, content: Any, key: str, idempotency_key: str | None = None
    ) -> tuple[int, Any]:
        """Sends JSON to another gateway; returns the status and what it answered."""
        lines = f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        if idempotency_key is not None:
            lines += f"Idempotency-Key: {idempotency_key}\r\n"
        response = await self._client.request(
            "POST", Url.parse(url), msgspec.json.encode(content), _CONTROL_SECONDS, header_lines=lines
        )
        try:
            return response.status, msgspec.json.decode(response.body)
        except msgspec.DecodeError:
            return response.status, None

    async def is_there(self, address: str) -> str | None:
        """Why nothing answers at the address; `None`: a gateway does."""
        try:
            response = await self._client.request(
                "GET", Url.parse(f"{address}/health"), None, _CONTROL_SECONDS
            )
        except (HttpFault, ValueError) as error:
            return str(error)
        return None if response.status == 200 else f"HTTP {response.status}"

    async def close(self) -> None:
        await self._client.close()


class RoutingApp(GatewayApp):
    """The ASGI app of a gateway whose rollouts may be held by the gateways of other workers."""

    def __init__(
        self,
        registry: RolloutRegistry,
        administration: Administration | None,
        max_body: int,
        routing: Routing,
    ) -> None:
        super().__init__(registry, administration, max_body)
        self._routing = routing
        self._forwarder = Forwarder()

    async def route(
        self, scope: Scope, path: tuple[str, ...], head: RequestHead, body: Body, receive: Receive, send: Send
    ) -> None:
        if (scope["method"], *path) == ("POST", "offers"):
            self._routing.admit_worker(head.key)
            await send_json(send, await self._routing.announce(await self.read(head, body, bytes)))
            return
        route = None
        if path[0] == "rollouts" and len(path) > 1:
            route = self._routing.find_route(unquote(path[1]), head.key)
        if route is None:
            await super().route(scope, path, head, body, receive, send)
            return
        content = await self.read(head, body, bytes)
        query = scope["query_string"].decode("latin-1")
        target = "/".join(("", *path)) + (f"?{query}" if query else "")
        request = ForwardedRequest(scope["method"], target, scope["headers"], content)
        response = await self._pass_on(request, route, receive)
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": [
                    *((name.lower(), value) for name, value in response.headers if name.lower() in _ANSWERED),
                    (b"content-length", str(len(response.body)).encode()),
                ],
            }
        )
        await send({"type": "http.response.body", "body": response.body})

    async def _pass_on(
        self, request: ForwardedRequest, route: RolloutRoute, receive: Receive
    ) -> HttpResponse:
        gone = asyncio.ensure_future(receive())
        try:
            response = await self._forwarder.pass_on(request, route, gone)
        except HttpFault as fault:
            await self._routing.note_fault(route)
            if route.moved.is_set():
                raise HttpRefusal(410, "sealed", OVER) from None
            raise HttpRefusal(503, "unavailable", f"the rollout's worker did not answer: {fault}") from None
        finally:
            gone.cancel()
        if response is None:
            raise Gone
        return response
