"""The code on the page about environments runs unmodified."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.envs.games.frozen_lake import FrozenLake
from rollwright.envs.games.sokoban import Sokoban

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(2))
def test_its_code_runs(number: int) -> None:
    ended = subprocess.run([sys.executable, "-c", BLOCKS[number]], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_it_names_every_option_of_the_games() -> None:
    assert len(BLOCKS) == 2
    for game in (FrozenLake, Sokoban):
        for option in inspect.signature(game).parameters:
            assert f"| `{option}` |" in PAGE.read_text()
