"""The gateway: addresses and keys for rollouts, on one port.

Always true: nothing listens before the first rollout is opened; it is reached from its own machine only, unless a host
is given on purpose; when it stops, calls under way are answered first.
"""

import asyncio
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from rollwright.gateway.endpoint import MAX_BODY, Administration, GatewayApp
from rollwright.gateway.recorder import RolloutRecorder
from rollwright.gateway.registry import OpenRollouts

if TYPE_CHECKING:
    from rollwright.http.server import Listener
    from rollwright.http.server_connection import ServerLimits


class Access(NamedTuple):
    """What an agent needs to be recorded."""

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
        """`public_url`: how agents reach it, where that is not the host and port."""
        self._host = host
        self._port = port
        self._public_url = None if public_url is None else public_url.rstrip("/")
        self._max_body = max_body
        self._limits = limits
        self.registry = OpenRollouts()
        self._server: Listener | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Where it is reached, once it listens."""
        return self._public_url or self._url

    def listen(self, administration: Administration | None = None) -> None:
        """Starts to serve, if it does not yet."""
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
        """Seals it; late calls are told that it is over."""
        self.registry.remove(rollout.session.trajectory.rollout_id, rollout)
        await rollout.seal()

    async def rest(self) -> None:
        """Stops to listen if no rollout is open; the next one starts it again."""
        if not self.registry:
            await self.close()

    async def close(self) -> None:
        """Stops to listen."""
        if self._server is not None and self._serving is not None:
            self._server.stop()
            await self._serving
        self._server = self._serving = None
