"""A worker: many environment managers side by side, one heartbeat for all of them.

Always true: an attempt that the store takes away (cancelled, or its lease lost) is stopped here as soon as the
store says so; the other episodes do not notice.
"""

import asyncio

from rollwright.rollout.env_manager import EnvManager, RolloutContext
from rollwright.store.contract import Store

HEARTBEAT_SECONDS = 10.0
"""Well under the lease, so that a few lost heartbeats do no harm."""

CANCELLATION_SECONDS = 60.0
"""How long one call waits for cancellations; it only bounds how long a lost wake-up could go unnoticed."""


class Worker:
    def __init__(
        self,
        context: RolloutContext,
        worker_id: str,
        num_envs: int,
        *,
        heartbeat_interval: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._context = context
        self._worker_id = worker_id
        self._heartbeat_interval = heartbeat_interval
        self._managers = [EnvManager(context, worker_id) for _ in range(num_envs)]

    @property
    def _store(self) -> Store:
        return self._context.store

    async def run(self) -> None:
        """Plays rollouts until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeat(), name=f"{self._worker_id}-heartbeat")
            tasks.create_task(self._listen(), name=f"{self._worker_id}-cancellations")
            for number, manager in enumerate(self._managers):
                tasks.create_task(manager.run_rollout_loop(), name=f"{self._worker_id}-env-{number}")

    async def _heartbeat(self) -> None:
        while True:
            held = [manager.holds for manager in self._managers if manager.holds is not None]
            self._withdraw(await self._store.update_worker(self._worker_id, attempts=held))
            await asyncio.sleep(self._heartbeat_interval)

    async def _listen(self) -> None:
        while True:
            self._withdraw(
                await self._store.wait_for_cancellations(self._worker_id, timeout=CANCELLATION_SECONDS)
            )

    def _withdraw(self, lost: list[tuple[str, str]]) -> None:
        gone = set(lost)
        for manager in self._managers if gone else ():
            if manager.holds in gone:
                manager.withdraw()
