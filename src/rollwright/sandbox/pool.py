"""Boxes for the attempts of one process: a limit from the machine's memory and cores, waiting in order, and warm boxes.

Always true: callers get boxes in the order in which they asked. The limit counts the boxes of all processes that share a
state folder, so several workers on a machine do not overload it together; one box may always run. `release` does not await
and cannot be interrupted; the box is ended in the background.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollwright.errors import RollwrightError
from rollwright.hardware import free_memory, usable_cores
from rollwright.sandbox.backends import choose_backend
from rollwright.sandbox.box import AssignableBox, Box, BoxBackend, BoxError, BoxLabel, BoxSpec, Feature
from rollwright.sandbox.leases import count_local_boxes, state_folder
from rollwright.sandbox.settings import AUTO

BOXES_PER_CORE = 32
"""Most boxes for each core: their commands mostly wait for the model."""

RESERVED_MEMORY = 512 << 20
"""Bytes that stay free for everything else."""

_MEMORY_SHARE = 8
"""A box is admitted when this fraction of its limit is free; few boxes ever use their limit."""

_LOOK_SECONDS = 0.2
"""Seconds between two looks at the machine while a caller waits: boxes of other processes end without a word."""

_log = logging.getLogger(__name__)


def may_start(*, running: int, cores: float, free: int, memory: int) -> bool:
    """Whether another box fits: `running` boxes on this machine, `free` bytes, `memory` bytes as its limit."""
    if running == 0:
        return True
    return running < BOXES_PER_CORE * max(1.0, cores) and free > RESERVED_MEMORY + memory // _MEMORY_SHARE


class BoxPool:
    """The boxes of one backend in this process. Belongs to one event loop."""

    def __init__(
        self,
        backend: str | BoxBackend = AUTO,
        *,
        options: Mapping[str, Any] | None = None,
        max_boxes: int | None = None,
        state: Path | None = None,
    ) -> None:
        """`options`: of the backend that is named. `max_boxes`: most boxes at the same time in this process, beside the machine's
        limit."""
        self._named = backend
        self._options = dict(options or {})
        self._backend: BoxBackend | None = None
        self._choosing = asyncio.Lock()
        self._turn = asyncio.Lock()  # asyncio's locks are given in the order in which they were asked for
        self._freed = asyncio.Event()
        self._max_boxes = max_boxes
        self._state = state or state_folder()
        self._started: set[Box] = set()
        self._starting = 0
        self._warm: defaultdict[bytes, list[Box]] = defaultdict(list)
        self._background: set[asyncio.Task[None]] = set()
        self.waiting = 0
        """Callers that wait for their turn or for the machine."""

    @property
    def in_use(self) -> int:
        """Boxes that attempts have, or wait for."""
        ending = sum(not each.done() for each in self._background)
        return max(0, len(self._started) - sum(map(len, self._warm.values())) - ending) + self.waiting

    async def backend(self) -> BoxBackend:
        """The backend, chosen at first use."""
        async with self._choosing:
            if self._backend is None:
                named = self._named
                self._backend = (
                    await choose_backend(named, self._options) if isinstance(named, str) else named
                )
        return self._backend

    async def start(self, spec: BoxSpec, label: BoxLabel, *, gateway: str = "", warm: int = 0) -> Box:
        """A box for an attempt, when there is room for one. `warm`: boxes of this spec to keep ready behind it."""
        backend = await self.backend()
        box = await self._take_warm(spec, label, gateway)
        if box is None:
            await self._wait_for_room(spec)
            try:
                box = await backend.start(spec, label, gateway=gateway)
            finally:
                self._starting -= 1
            self._started.add(box)
        if warm and len(self._warm[spec.key]) < warm:
            self._in_background(self._warm_up(spec, warm))
        return box

    def adopt(self, box: Box) -> None:
        """Counts a box that was not started here, such as a fork, and lets `release` end it."""
        self._started.add(box)

    def release(self, box: Box) -> None:
        """Ends a box in the background."""
        if box in self._started:
            self._in_background(self._end(box))

    async def aclose(self) -> None:
        """Ends all boxes."""
        for task in list(self._background):
            if not task.done():
                await asyncio.wait({task})
        if self._backend is not None:
            await self._backend.aclose()
        self._started.clear()
        self._warm.clear()

    async def _take_warm(self, spec: BoxSpec, label: BoxLabel, gateway: str) -> Box | None:
        ready = self._warm.get(spec.key, [])
        while ready:
            box = ready.pop()
            if box.has_ended:
                self._started.discard(box)
                continue
            assert isinstance(box, AssignableBox)
            try:
                await box.assign(label, gateway)
            except BoxError:
                self.release(box)
                continue
            return box
        return None

    async def _warm_up(self, spec: BoxSpec, count: int) -> None:
        """Starts boxes without an attempt as far as there is room; they have no way out before they are assigned."""
        backend = await self.backend()
        while len(self._warm[spec.key]) < count and not self.waiting and self._has_room(spec):
            self._starting += 1
            try:
                box = await backend.start(spec, BoxLabel())
            except RollwrightError as error:
                _log.warning("a box could not be started ahead: %s", error)
                return
            finally:
                self._starting -= 1
            self._started.add(box)
            if not isinstance(box, AssignableBox):
                self.release(box)
                return
            self._warm[spec.key].append(box)

    async def _wait_for_room(self, spec: BoxSpec) -> None:
        self.waiting += 1
        try:
            async with self._turn:
                while not self._has_room(spec):
                    if self._end_one_warm():
                        continue
                    self._freed.clear()
                    try:
                        async with asyncio.timeout(_LOOK_SECONDS):
                            await self._freed.wait()
                    except TimeoutError:
                        pass
                self._starting += 1
        finally:
            self.waiting -= 1

    def _has_room(self, spec: BoxSpec) -> bool:
        own = len(self._started) + self._starting
        if self._max_boxes is not None and own >= self._max_boxes:
            return False
        if self._backend is not None and Feature.REMOTE in self._backend.features:
            return True  # the service has limits of its own, and says so
        running = max(own, count_local_boxes(self._state) + self._starting)
        return may_start(
            running=running, cores=usable_cores().count, free=free_memory(), memory=spec.memory_mb << 20
        )

    def _end_one_warm(self) -> bool:
        """Makes room by a box that nobody uses."""
        for boxes in self._warm.values():
            if boxes:
                self.release(boxes.pop())
                return True
        return False

    async def _end(self, box: Box) -> None:
        try:
            await box.stop()
        except (RollwrightError, OSError) as error:
            _log.warning("box %s could not be ended: %s", box.id, error)
        finally:
            self._started.discard(box)
            self._freed.set()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class BoxPools:
    """One pool for each backend, with its options, that is used in this process."""

    def __init__(self) -> None:
        self._pools: dict[bytes, BoxPool] = {}

    def get(self, backend: str = AUTO, options: Mapping[str, Any] | None = None) -> BoxPool:
        key = msgspec.json.encode([backend, options or {}], order="deterministic")
        if key not in self._pools:
            self._pools[key] = BoxPool(backend, options=options)
        return self._pools[key]

    async def rest(self) -> None:
        """Ends pools whose boxes are used by nobody, with their warm boxes; the next call of `get` makes new ones."""
        for name, pool in list(self._pools.items()):
            if not pool.in_use:
                del self._pools[name]
                await pool.aclose()
