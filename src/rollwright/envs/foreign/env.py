"""Base of environments that live in a foreign process.

Always true: a reset after a failure, a hang or a crash begins in a new process; `close` ends the process.
"""

import copy
from typing import Any, Self

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.foreign.connection import ForeignConnection, connect
from rollwright.envs.foreign.package import ForeignPackage


class ForeignEnv:
    """The process of one environment."""

    stateless = False
    """Whether `fork()` gives an exact copy; see `rollwright.envs.base.can_fork`."""

    def __init__(self, package: ForeignPackage, options: dict[str, Any]) -> None:
        self._package = package
        self._options = options
        self._connection: ForeignConnection | None = None

    async def _begin(self, **arguments: Any) -> Any:
        """Calls `reset` of the environment, in a new process if there is none."""
        if self._connection is None:
            self._connection = await connect(self._package, self._options)
        return await self._ask("reset", **arguments)

    async def _ask(self, operation: str, **arguments: Any) -> Any:
        if self._connection is None:
            raise EnvironmentFailure(f"{self._package.name}: no episode is running; call reset first")
        try:
            return await self._connection.ask(operation, **arguments)
        except BaseException:
            await self.close()
            raise

    def _forked(self) -> Self:
        if self._connection is None:
            raise EnvironmentFailure(f"{self._package.name}: no episode is running; call reset first")
        twin = copy.copy(self)
        twin._connection = self._connection.fork()
        return twin

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
