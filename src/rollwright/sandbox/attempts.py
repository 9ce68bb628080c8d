"""The boxes of one attempt: found by whatever runs in the attempt's task, and ended with it.

Always true: the attempt's own box is started once, when it is first requested; concurrent callers wait
for the same box. After `release`, which does not await, no box can be started any more.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar

from rollwright.sandbox.box import (
    NO_NEEDS,
    Box,
    BoxBackend,
    BoxError,
    BoxLabel,
    BoxNeeds,
    BoxSpec,
    Network,
)
from rollwright.sandbox.pool import BoxPool

NO_BOX = "this attempt has no box; set custom_envs.TAG.box"


class AttemptBoxes:
    """Boxes of one attempt."""

    def __init__(
        self,
        pool: BoxPool,
        label: BoxLabel,
        spec: BoxSpec | None = None,
        *,
        warm: int = 0,
        needs: BoxNeeds = NO_NEEDS,
    ) -> None:
        """`spec`: of the attempt's own box; `None`: it has one only if its environment brings one. `needs`: what the agent
        needs of the box that it works in."""
        self._pool = pool
        self.label = label
        self.gateway: Callable[[], str] | None = None
        """Opens the attempt's gateway and returns its address."""
        self.agent_user: str | None = None
        """User that the agent works as; `None`: the box's own."""
        self.agent_seconds: float | None = None
        """Time limit of the agent; `None`: the task has none."""
        self.needs = needs
        self._spec = None if spec is None else needs.apply(spec)
        self._warm = warm
        self._own: asyncio.Task[Box] | None = None
        self._adopted: Box | None = None
        self._boxes: list[Box] = []
        self._is_over = False

    @property
    def has_box(self) -> bool:
        """Whether `box` gives one."""
        return self._spec is not None or self._adopted is not None

    async def box(self) -> Box:
        """The attempt's own box."""
        if self._adopted is not None:
            return self._adopted
        if self._spec is None:
            raise BoxError(NO_BOX)
        if self._own is None:
            self._own = asyncio.create_task(self.start(self._spec, warm=self._warm))
        return await asyncio.shield(self._own)

    async def backend(self) -> BoxBackend:
        """The backend that starts them."""
        return await self._pool.backend()

    async def start(self, spec: BoxSpec, *, warm: int = 0) -> Box:
        """A further box, which ends with the attempt or by `end`."""
        if self._is_over:
            raise BoxError("the attempt is over; its boxes are gone")
        reaches = spec.network is Network.GATEWAY or (self.needs.gateway and spec.network is not Network.NONE)
        wants_gateway = reaches and self.gateway is not None
        gateway = self.gateway() if wants_gateway and self.gateway is not None else ""
        box = await self._pool.start(spec, self.label, gateway=gateway, warm=warm)
        self.keep(box)
        return box

    def keep(self, box: Box) -> None:
        """Has a box, for example a fork, end with the attempt."""
        if self._is_over:
            self._pool.release(box)
            raise BoxError("the attempt is over; its boxes are gone")
        self._pool.adopt(box)
        self._boxes.append(box)

    def adopt(self, box: Box | None, *, user: str | None = None, seconds: float | None = None) -> None:
        """Makes a box of the environment the attempt's own, for tools, rewards and agents. `user` and `seconds`: of the
        agent."""
        self._adopted, self.agent_user, self.agent_seconds = box, user, seconds

    def end(self, box: Box) -> None:
        """Ends one box before the attempt does."""
        if box in self._boxes:
            self._boxes.remove(box)
            self._pool.release(box)
        if self._adopted is box:
            self._adopted = None

    def release(self) -> None:
        """Ends all boxes, in the background."""
        self._is_over = True
        if self._own is not None and not self._own.done():
            self._own.cancel()
        for box in self._boxes:
            self._pool.release(box)
        self._boxes.clear()


_current: ContextVar[AttemptBoxes | None] = ContextVar("rollwright_attempt_boxes", default=None)


class use_boxes:
    """`with use_boxes(boxes):` makes these the boxes of everything that runs inside the block, and ends them after it."""

    __slots__ = ("_boxes", "_token")

    def __init__(self, boxes: AttemptBoxes) -> None:
        self._boxes = boxes

    def __enter__(self) -> AttemptBoxes:
        self._token = _current.set(self._boxes)
        return self._boxes

    def __exit__(self, *raised: object) -> None:
        _current.reset(self._token)
        self._boxes.release()


def current_boxes() -> AttemptBoxes:
    """The boxes of the attempt that this code runs in."""
    found = _current.get()
    if found is None:
        raise BoxError("there is no attempt here whose box could be used")
    return found


def find_boxes() -> AttemptBoxes | None:
    """The boxes of the attempt that this code runs in; `None`: it runs in none."""
    return _current.get()
