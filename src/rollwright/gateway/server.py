"""The gateway: addresses and keys for rollouts, on one port.

Always true: the server does not listen before the first rollout is opened; it is reachable from its own machine only, unless
a host is given; when it stops, calls in progress are answered first.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from rollwright.gateway.endpoint import MAX_BODY, Administration, GatewayApp
from rollwright.gateway.forwarding import Routing, RoutingApp
from rollwright.gateway.recorder import RolloutRecorder
from rollwright.gateway.registry import RolloutRegistry

if TYPE_CHECKING:
    from rollwright.http.server import Listener
    from rollwright.http.server_limits import ServerLimits


class Access(NamedTuple):
    """Address and key with which an agent is recorded."""

    base_url: str
    api_key: str


class Gateway:
    """Listens from the first `open` on, on `host` and `port` (0: any free one). Belongs to one event loop."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        max_body: int = MAX_BODY,
        limits: "ServerLimits | None" = None,
        more_hosts: Sequence[str] = (),
    ) -> None:
        """`public_url`: address for agents, if it is not the host and port. `more_hosts`: listened on too, each at a
        free port."""
        self._host = host
        self._port = port
        self._public_url = None if public_url is None else public_url.rstrip("/")
        self._max_body = max_body
        self._limits = limits
        self._more_hosts = more_hosts
        self.registry = RolloutRegistry()
        self._server: Listener | None = None
        self._serving: asyncio.Task[None] | None = None
        self.urls: tuple[str, ...] = ()
        """Where the server listens; empty before it does."""

    @property
    def url(self) -> str:
        """Address of the listening server for agents."""
        return self._public_url or (self.urls[0] if self.urls else "")

    def listen(self, administration: Administration | None = None, routing: Routing | None = None) -> None:
        """Starts the server if it is not running."""
        if self._serving is not None:
            return
        from rollwright.http.server import Listener, listening_socket

        loop = asyncio.get_running_loop()
        sockets = [listening_socket(self._host, self._port)]
        sockets += [listening_socket(each, 0) for each in self._more_hosts]
        hosts = (self._host, *self._more_hosts)
        self.urls = tuple(
            f"http://{f'[{host}]' if ':' in host else host}:{each.getsockname()[1]}"
            for host, each in zip(hosts, sockets, strict=True)
        )
        app = (
            GatewayApp(self.registry, administration, self._max_body)
            if routing is None
            else RoutingApp(self.registry, administration, self._max_body, routing)
        )
        self._server = Listener(app, self._limits)
        self._serving = loop.create_task(self._server.serve(sockets), name="gateway")

    def open(self, rollout: RolloutRecorder) -> Access:
        """Makes the rollout callable."""
        self.listen()
        key = self.registry.add(rollout)
        return Access(f"{self.address(rollout.session.trajectory.rollout_id)}/v1", key)

    def address(self, rollout_id: str) -> str:
        return f"{self.url}/rollouts/{quote(rollout_id, safe='')}"

    async def close_rollout(self, rollout: RolloutRecorder) -> None:
        """Seals the rollout; later calls are told that it has ended."""
        self.registry.remove(rollout.session.trajectory.rollout_id, rollout)
        await rollout.seal()

    async def rest(self) -> None:
        """Stops the server if no rollout is open; the next `open` starts it again."""
        if not self.registry:
            await self.close()

    async def close(self) -> None:
        """Stops the server."""
        if self._server is not None and self._serving is not None:
            self._server.stop()
            await self._serving
        self._server = self._serving = None
