"""What redraws itself is drawn on a terminal, and nowhere else; elsewhere lines say how far it is."""

import asyncio
from io import StringIO

import pytest
from rich.console import Console

from rollwright.aio import run_virtual
from rollwright.cli.console import clock_time
from rollwright.cli.live import LiveDisplay, Pace, episodes_wanted, next_line
from rollwright.config import build


@pytest.mark.parametrize(("terminal", "enabled"), [(True, True), (True, False), (False, True)])
def test_it_is_drawn_again_and_again_on_a_terminal_alone(terminal: bool, enabled: bool) -> None:
    drawn = 0

    def draw() -> str:
        nonlocal drawn
        drawn += 1
        return "figures"

    async def main() -> tuple[int, int]:
        screen = Console(file=StringIO(), force_terminal=terminal)
        async with LiveDisplay(screen, draw, every=10.0, enabled=enabled):
            await asyncio.sleep(35.0)
        inside = drawn
        await asyncio.sleep(3600.0)
        return inside, drawn

    times = 4 if terminal and enabled else 0
    assert run_virtual(main()) == (times, times), "nothing is drawn once it is left"


async def test_without_a_terminal_lines_say_how_far_it_is() -> None:
    said, twice = StringIO(), asyncio.Event()
    told = iter(["step 1 of 4", "step [2] of 4"])

    def line() -> str:
        found = next(told, None)
        if found is None:
            twice.set()
        return found or "more"

    screen = Console(file=said)
    async with LiveDisplay(screen, lambda: "drawn", every=0.001, line=line, pause=lambda elapsed: 0.001):
        await asyncio.wait_for(twice.wait(), 60)
    assert said.getvalue().splitlines()[:2] == ["step 1 of 4", "step [2] of 4"]
    assert "drawn" not in said.getvalue()


def test_lines_come_soon_and_then_ever_more_rarely() -> None:
    pauses = [next_line(elapsed) for elapsed in (0.0, 3.0, 90.0, 9000.0)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 5


def test_the_time_left_follows_the_pace_since_this_process_began() -> None:
    assert Pace(done=30, total=40, elapsed=10.0, began_at=20).left == pytest.approx(10.0)
    assert Pace(done=20, total=40, elapsed=10.0, began_at=20).left is None
    assert Pace(done=40, total=40, elapsed=10.0).left == 0.0
    assert "75% · 0:10 elapsed · about 0:10 left" in str(Pace(30, 40, 10.0, 20))
    assert clock_time(3725.0) == "1:02:05"


def test_a_runs_whole_is_its_batches_and_the_levels_of_every_validation() -> None:
    content = {
        "max_steps": 10,
        "rollout_batch_size": 8,
        "eval_steps": 5,
        "train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["FrozenLake"]},
        "val_env_manager": {"num_env_groups": 3, "tags": ["FrozenLake"]},
    }
    assert episodes_wanted(build(content)) == 10 * 8 + 2 * 3  # after 5 batches, and at the end
    del content["train_env_manager"]
    assert episodes_wanted(build(content)) == 3
