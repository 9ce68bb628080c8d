"""The changes that `CONTRIBUTING.md` shows are small, apply to the tree as it is, and work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MOST_LINES = 20
MOST_FILES = 2

SECTIONS = dict(
    re.findall(
        r"^### ([^\n]+)\n(?:(?!^###).)*?^```diff\n(.*?)^```",
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
)
"""Each diff under its heading."""

PLAYED = """
import asyncio, sys
from rollwright.config import build
from rollwright.run.run import Run

async def play(config):
    async with Run(config) as run:
        return (await run.get_batch()).trajectories

def games(tag, **more):
    manager = {"num_env_groups": 1, "group_size": 2, "tags": [tag]}
    content = {"policy": {"tokens_per_second": 1e5}, "train_env_manager": manager, **more}
    return asyncio.run(play(build(content)))
"""

CHECKS = {
    "Add an environment": PLAYED + "assert [each.tag for each in games('Pond')] == ['Pond'] * 2",
    "Add an advantage": PLAYED
    + """
from rollwright.training.advantages import make_advantage
groups = [games("FrozenLake")]
found = make_advantage("raw")(groups)
assert [len(turns) for turns in found[0]] == [len(each.turns) for each in groups[0]]
""",
    "Add a loss": """
import torch
from rollwright.config import build
from rollwright.training.losses import token_losses
settings = build({"training": {"loss": "plain"}}).training.loss
found = token_losses(torch.tensor([2.0]), torch.zeros(1), torch.tensor([3.0]), settings)
assert found.losses.tolist() == [-6.0]
""",
    "Add an engine dialect": """
from rollwright.engines.settings import DIALECTS
assert DIALECTS.make("fork").path == "/v2/generate"
""",
    "Add a key that reaches the rollout": PLAYED
    + """
from rollwright.simulation.engine import SimulatedEngine

asked, generate = [], SimulatedEngine.generate

async def listen(self, prompt, sampling):
    asked.append(bytes(each for each in prompt.ids if each < 256).decode(errors="ignore"))
    return await generate(self, prompt, sampling)

SimulatedEngine.generate = listen
played = games("FrozenLake", agent={"history": {"reminder": "Mind the holes!"}})
later = sum(len(each.turns) - 1 for each in played)
assert later and sum("Mind the holes!" in text for text in asked) >= later, asked
""",
}


def test_every_change_that_is_shown_is_checked() -> None:
    assert set(SECTIONS) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_change_is_small(name: str) -> None:
    lines = SECTIONS[name].splitlines()
    assert len(lines) <= MOST_LINES
    assert sum(line.startswith("+++ ") for line in lines) <= MOST_FILES


@pytest.mark.parametrize("name", CHECKS)
def test_a_change_applies_and_works(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    # The lines around a change may have moved since it was written, so their numbers do not count.
    patched = subprocess.run(
        ["patch", "-p1", "--batch", "--fuzz=0"],
        input=SECTIONS[name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert patched.returncode == 0, patched.stdout
    done = subprocess.run(
        [sys.executable, "-c", CHECKS[name]],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
