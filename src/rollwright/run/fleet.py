"""Worker processes of a run: started, watched, replaced when they die, and as many as there is work for.

Always true: a process that dies takes nothing with it but its own last generation, because the store gives its
rollouts to another when their lease ends. No worker outlives the run that started it. A worker that keeps dying right after its start ends the run with its last
words, instead of being started for ever.
"""

import asyncio
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from rollwright.errors import RollwrightError
from rollwright.rollout import Activity
from rollwright.store.contract import Store
from rollwright.store.opening import TOKEN_VARIABLE
from rollwright.store.records import RolloutStatus
from rollwright.workers.autoscale import Autoscaler, ScaleRules

LOOK_SECONDS = 0.5
STOP_SECONDS = 45.0
"""What a worker gets to drain before it is killed; its own limit for that is shorter."""
SHORT_LIFE = 5.0
"""A worker that dies sooner than this after its start is likely to die again."""
MOST_SHORT_LIVES = 3
_BLOCK = 64 * 1024


class _Life:
    """One worker process, from its start on."""

    def __init__(self, process: Process, began: float) -> None:
        self.process = process
        self.began = began
        self.last_words = ""
        """The last line it wrote to its standard error."""
        self.listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        """Keeps its standard error empty: a process whose pipe is full would stop."""
        assert self.process.stderr is not None
        while block := await self.process.stderr.read(_BLOCK):
            lines = block.decode(errors="replace").strip().splitlines()
            self.last_words = lines[-1][:500] if lines else self.last_words


class WorkerFleet:
    def __init__(
        self,
        store: Store,
        address: str,
        rules: ScaleRules,
        activity: Activity,
        *,
        token: str | None = None,
        heartbeat_interval: float = 5.0,
        find_capacity: bool = True,
    ) -> None:
        """`address`: where the workers find the store. `activity` is told what they report with their heartbeats."""
        self._store = store
        self._address = address
        self._rules = rules
        self._scaler = Autoscaler(rules)
        self._activity = activity
        self._environment = {**os.environ, **({TOKEN_VARIABLE: token} if token else {})}
        self._heartbeat_interval = heartbeat_interval
        self._find_capacity = find_capacity
        self._prefix = f"worker-{secrets.token_hex(3)}-"
        """Of all its workers' ids, so that no other run in the same store has them too."""
        self._processes: dict[str, _Life] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._started = 0
        self._short_lives = 0

    @property
    def pids(self) -> dict[str, int]:
        """The processes by the name of their worker."""
        return {name: life.process.pid for name, life in self._processes.items()}

    async def run(self) -> None:
        """Keeps the right number of workers alive until it is cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                await self._bury_the_dead(clock())
                counts = await self._store.statistics()
                waiting = counts[RolloutStatus.QUEUING] + counts[RolloutStatus.REQUEUING]
                claimed = counts[RolloutStatus.PREPARING] + counts[RolloutStatus.RUNNING]
                wanted = self._scaler.wanted(waiting, claimed, len(self._processes), clock())
                while len(self._processes) < wanted:
                    await self._start(clock())
                for name in list(self._processes)[wanted:]:
                    self._let_go(name)
                await self._listen()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for name in list(self._processes):
                self._let_go(name)
            await asyncio.shield(self._end())

    async def _end(self) -> None:
        await asyncio.gather(*self._stopping, return_exceptions=True)
        with suppress(RollwrightError):  # figures only; a store that is gone has been noticed already
            await self._listen()  # what the workers told last

    async def _start(self, now: float) -> None:
        name = f"{self._prefix}{self._started}"
        self._started += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollwright",
            "worker",
            "--store",
            self._address,
            "--id",
            name,
            "--envs",
            str(self._rules.envs_per_worker),
            "--heartbeat-interval",
            str(self._heartbeat_interval),
            "--find-capacity" if self._find_capacity else "--no-find-capacity",
            "--quiet",
            "--tied",
            stdin=PIPE,  # held open and never written to: its end tells the worker that the run is gone
            stderr=PIPE,
            env=self._environment,
            start_new_session=True,  # a Ctrl-C is the run's to handle; it drains its workers
        )
        self._processes[name] = _Life(process, now)

    async def _bury_the_dead(self, now: float) -> None:
        for name, life in list(self._processes.items()):
            if life.process.returncode is None:
                continue
            del self._processes[name]
            await asyncio.wait({life.listening}, timeout=1.0)
            self._activity.dead_workers += 1
            self._short_lives = self._short_lives + 1 if now - life.began < SHORT_LIFE else 0
            if self._short_lives >= MOST_SHORT_LIVES:
                last = life.last_words or f"exit code {life.process.returncode}"
                raise RollwrightError(
                    f"{self._short_lives} workers in a row died at their start; the last said: {last}"
                )

    def _let_go(self, name: str) -> None:
        task = asyncio.create_task(_stop(self._processes.pop(name).process))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _listen(self) -> None:
        """What the workers told the store with their heartbeats."""
        for worker in await self._store.query_workers():
            if worker.worker_id.startswith(self._prefix):
                self._activity.elsewhere[worker.worker_id] = Activity.told(
                    worker.heartbeat_stats, alive=worker.worker_id in self._processes
                )


async def _stop(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()  # not `communicate`, which closes its standard input
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
