"""What is shown while something runs: redrawn in the terminal, or a plain line now and then where there is none.

Always true: nothing is drawn on anything but a terminal, and of what was drawn nothing stays on the screen; lines are said
only where nothing is drawn.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from rollwright.cli.console import plain_lines
from rollwright.cli.pace import next_line


class Redrawn:
    """`async with Redrawn(screen, draw, every=0.5):` shows what `draw` gives, anew every so many seconds.

    `line`: what is said from time to time where nothing is drawn; `None`: nothing."""

    def __init__(
        self,
        screen: Console,
        draw: Callable[[], RenderableType],
        *,
        every: float,
        enabled: bool = True,
        line: Callable[[], str] | None = None,
        pause: Callable[[float], float] = next_line,
    ) -> None:
        self._draw = draw
        self._every = every
        self._live = Live(console=screen, transient=True, auto_refresh=False)
        self._enabled = enabled and screen.is_terminal
        self._say = plain_lines(screen)
        self._line = line
        self._pause = pause
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._enabled:
            self._live.start()
            self._task = asyncio.create_task(self._redraw())
        elif self._line is not None:
            self._task = asyncio.create_task(self._tell(self._line))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._enabled:
            self._live.stop()

    async def _redraw(self) -> None:
        while True:
            self._live.update(self._draw(), refresh=True)
            await asyncio.sleep(self._every)

    async def _tell(self, line: Callable[[], str]) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            await asyncio.sleep(self._pause(clock() - began))
            self._say(line())
