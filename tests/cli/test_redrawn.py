"""What redraws itself is drawn on a terminal, and nowhere else."""

import asyncio
from io import StringIO

import pytest
from rich.console import Console

from rollwright.cli.redrawn import Redrawn


@pytest.mark.parametrize(("terminal", "enabled"), [(True, True), (True, False), (False, True)])
async def test_it_is_drawn_again_and_again_on_a_terminal_alone(terminal: bool, enabled: bool) -> None:
    drawn, twice = 0, asyncio.Event()

    def draw() -> str:
        nonlocal drawn
        drawn += 1
        if drawn == 2:
            twice.set()
        return "figures"

    screen = Console(file=StringIO(), force_terminal=terminal)
    async with Redrawn(screen, draw, every=0.001, enabled=enabled):
        if terminal and enabled:
            await asyncio.wait_for(twice.wait(), 60)
        else:
            await asyncio.sleep(0.05)
    assert bool(drawn) is (terminal and enabled)
    after = drawn
    await asyncio.sleep(0.02)
    assert drawn == after, "nothing is drawn once it is left"
