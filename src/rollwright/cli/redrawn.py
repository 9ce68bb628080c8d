"""What redraws itself in the terminal while something runs.

Always true: on anything but a terminal nothing is drawn, and when it is left nothing of it stays on the screen.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live


class Redrawn:
    """`async with Redrawn(screen, draw, every=0.5):` shows what `draw` gives, anew every so many seconds."""

    def __init__(
        self, screen: Console, draw: Callable[[], RenderableType], *, every: float, enabled: bool = True
    ) -> None:
        self._draw = draw
        self._every = every
        self._live = Live(console=screen, transient=True, auto_refresh=False)
        self._enabled = enabled and screen.is_terminal
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._enabled:
            self._live.start()
            self._task = asyncio.create_task(self._redraw())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._live.stop()

    async def _redraw(self) -> None:
        while True:
            self._live.update(self._draw(), refresh=True)
            await asyncio.sleep(self._every)
