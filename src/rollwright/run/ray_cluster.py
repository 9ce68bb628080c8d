"""The connection to a Ray cluster: joined, or started on this machine, and left again.

Always true: a Ray that the program has joined already is used and left as it is; one that was started here ends with
the connection. What Ray has to say stays in Ray's log files.
"""

import asyncio
import logging
import os
from types import TracebackType
from typing import Self

from rollwright.errors import ConfigError

# Ray prints what happens to nodes and processes even where nothing is to be printed, with pages of its log; the fleet
# says the same in one line. Ray reads this variable when it is imported.
os.environ.setdefault(
    "RAY_DEDUP_LOGS_SKIP_REGEX",
    "^(Raylet is terminated|The node with node id|A worker died or was killed)",
)

import ray

LOCAL = "local"
"""In place of an address: starts a Ray on this machine."""
AUTO = "auto"
"""In place of an address: the cluster that this machine is a node of."""
LOOPBACK = "127.0.0.1"

CONNECT_SECONDS = 10.0
"""An address that does not take a connection for so long is wrong. Ray itself would go on trying for minutes."""


class RayCluster:
    """Use it as an async context manager; inside the block, Ray can be called."""

    def __init__(self, address: str) -> None:
        """`address`: `HOST:PORT` of a cluster that this machine is a node of, `auto`, or `local`."""
        if "://" in address:
            raise ConfigError(
                f"ray: {address!r} is for programs outside of the cluster; start the run on one of its nodes, "
                "with auto or HOST:PORT"
            )
        if address not in (AUTO, LOCAL):
            _, found, port = address.rpartition(":")
            if not found or not port.isdecimal():
                raise ConfigError(f"ray: got {address!r}; accepted are {AUTO}, {LOCAL} and HOST:PORT")
        self._address = address
        self._joined = False
        """Whether this object made the connection, and so has to end it."""

    @property
    def cpus(self) -> int:
        """Of all nodes that are there now."""
        return int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]

    @property
    def host(self) -> str:
        """Where actors reach this process: on loopback when none can be elsewhere, now or later."""
        started_here = self._joined and self._address == LOCAL
        return LOOPBACK if started_here else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        if not ray.is_initialized():
            if self._address not in (AUTO, LOCAL):
                await _knock(self._address)
            await asyncio.to_thread(_join, self._address)  # in a thread it also leaves the signals alone
            self._joined = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._joined:
            await asyncio.to_thread(ray.shutdown)


async def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError) as error:  # a timeout is an OSError; a port too large, an OverflowError
        raise ConfigError(f"ray: nothing answers at {address}: {error or 'timeout'}") from None
    writer.close()


def _join(address: str) -> None:
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a private Ray has nobody to report to
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address == LOCAL else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address == AUTO and isinstance(error, ConnectionError):
            raise ConfigError(
                f"ray: this machine is no node of a running cluster; `ray start` makes it one, {LOCAL} needs none"
            ) from error
        raise ConfigError(f"ray: cannot join {address}: {str(error).splitlines()[0]}") from error
