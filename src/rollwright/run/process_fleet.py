"""Workers of a run as processes on this machine. No worker outlives the run that started it."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection
from contextlib import suppress

from rollwright.hardware import WORKERS_VARIABLE
from rollwright.rollout import Activity
from rollwright.run.fleet import SHORT_LIFE, STOP_SECONDS, Fleet, ScaleRules
from rollwright.store.api import Store
from rollwright.store.opening import ADDRESS_VARIABLE

DRAIN_SECONDS = 5.0
"""Seconds for episodes to finish when the run is interrupted; longer ones are requeued, and resume from their journals."""

_BLOCK = 64 * 1024
"""Capacity of a pipe."""


class _Life:
    """One worker process, and the reader of its standard error."""

    def __init__(self, process: Process, began: float) -> None:
        self.process = process
        self.began = began
        self.last_words = ""
        """Last line of its standard error."""
        self.reading = asyncio.create_task(self._read_errors())

    async def _read_errors(self) -> None:
        """Drain its standard error: a process whose pipe is full would block."""
        assert self.process.stderr is not None
        while block := await self.process.stderr.read(_BLOCK):
            lines = block.decode(errors="replace").strip().splitlines()
            self.last_words = lines[-1][:500] if lines else self.last_words


class ProcessFleet(Fleet):
    kind = "process"

    def __init__(
        self,
        store: Store,
        address: str,
        rules: ScaleRules,
        activity: Activity,
        *,
        heartbeat_interval: float = 5.0,
        find_capacity: bool = True,
    ) -> None:
        """`address`: of the store, for the workers."""
        super().__init__(store, rules, activity)
        self._command = [
            *(sys.executable, "-m", "rollwright", "worker", "--quiet", "--tied"),
            *("--drain-seconds", str(DRAIN_SECONDS)),
            *("--envs", str(rules.envs_per_worker), "--heartbeat-interval", str(heartbeat_interval)),
            "--find-capacity" if find_capacity else "--no-find-capacity",
        ]
        # The address may hold a password, and every user of the machine can read the arguments of a process.
        self._environment = {**os.environ, WORKERS_VARIABLE: str(rules.maximum), ADDRESS_VARIABLE: address}
        self._lives: dict[str, _Life] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker name."""
        return {name: life.process.pid for name, life in self._lives.items()}

    def _alive(self) -> Collection[str]:
        return self._lives.keys()

    async def _start(self, name: str, now: float) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            "--id",
            name,
            env=self._environment,
            stdin=PIPE,  # held open, never written to: at end-of-file the worker knows that the run is gone
            stderr=PIPE,
            start_new_session=True,  # Ctrl-C goes to the run alone, which drains its workers
        )
        self._lives[name] = _Life(process, now)

    async def _reap(self, now: float) -> None:
        for name, life in list(self._lives.items()):
            if life.process.returncode is None:
                continue
            del self._lives[name]
            await asyncio.wait({life.reading}, timeout=1.0)
            words = life.last_words or f"exit code {life.process.returncode}"
            self._count_death(words, short=now - life.began < SHORT_LIFE)

    async def _stop(self, name: str) -> None:
        process = self._lives.pop(name).process
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()  # not `communicate`, which closes its standard input
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
