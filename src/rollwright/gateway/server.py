"""The gateway: addresses and keys for rollouts, on one port.

Always true: the server does not listen before the first rollout is opened; it is reachable from its own machine only, unless
a host is given; when it stops, calls in progress are answered first.
"""

import asyncio
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from rollwright.gateway.endpoint import MAX_BODY, Administration, GatewayApp
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
    ) -> None:
        """`public_url`: address for agents, if it is not the host and port."""
        self._host = host
        self._port = port
        self._public_url = None if public_url is None else public_url.rstrip("/")
        self._max_body = max_body
        self._limits = limits
        self.registry = RolloutRegistry()
        self._server: Listener | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Address of the listening server."""
        return self._public_url or self._url

    def listen(self, administration: Administration | None = None) -> None:
        """Starts the server if it is not running."""
        if self._serving is not None:
            return
        from rollwright.http.server import Listener, listening_socket

        loop = asyncio.get_running_loop()
        listening = listening_socket(self._host, self._port)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._url = f"http://{host}:{listening.getsockname()[1]}"
        self._server = Listener(GatewayApp(self.registry, administration, self._max_body), self._limits)
        self._serving = loop.create_task(self._server.serve([listening]), name="gateway")

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
