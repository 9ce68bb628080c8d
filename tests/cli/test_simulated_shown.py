"""A run that the simulated engine has played says so wherever its figures stand; one of another policy never does."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.config import build
from rollwright.run.folder import SIMULATED, RunReader

CONFIG = """
name: lake
max_steps: 2
{policy}
train_env_manager: {{num_env_groups: 2, group_size: 2, tags: [FrozenLake]}}
"""

FAST = "policy: {tokens_per_second: 100000}"


def rollwright(*words: str, folder: Path) -> str:
    command = [sys.executable, "-m", "rollwright", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def played(folder: Path, policy: str) -> str:
    """Plays a run under `runs/lake`; gives what the command said."""
    (folder / "lake.yaml").write_text(CONFIG.format(policy=policy), encoding="utf-8")
    return rollwright("run", "lake.yaml", folder=folder)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("simulated")
    return folder, played(folder, FAST)


def titles(said: str) -> list[str]:
    beginnings = ("results of", "where every", "profile of", "trajectories", "group ")
    return [line.rstrip() for line in said.splitlines() if line.startswith(beginnings)]


def test_every_table_of_a_simulated_run_says_so(simulated: tuple[Path, str]) -> None:
    folder, said = simulated
    shown = said + "".join(
        rollwright(*words, folder=folder)
        for words in (["show", "runs/lake"], ["show", "runs/lake", "g0"], ["profile", "runs/lake"])
    )
    assert len(titles(shown)) == 3 + 3 + 1 + 1
    assert all(title.endswith(f"· {SIMULATED}") for title in titles(shown))
    assert f"lake.train-g0-m0 {SIMULATED}" in rollwright("show", "runs/lake", "g0-m0", folder=folder)


def test_pictures_and_exports_of_a_simulated_run_say_so(simulated: tuple[Path, str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("matplotlib")
    from rollwright.observe.plots import picture_of

    folder, _ = simulated
    assert picture_of(RunReader(folder / "runs" / "lake")).name == f"lake · {SIMULATED}"
    rollwright("export", "runs/lake", folder=folder)
    metadata = parquet.read_schema(folder / "runs" / "lake" / "trajectories.parquet").metadata
    assert metadata[b"simulated"] == b"true"


def test_a_run_without_a_policy_is_simulated_and_one_line_names_the_choices_B5(tmp_path: Path) -> None:
    said = played(tmp_path, "")
    (line,) = [each for each in said.splitlines() if each.startswith("policy: is not set")]
    assert "simulated engine" in line
    for kind in ("oracle", "openai", "vllm", "torch"):
        assert kind in line
    assert titles(said)[0] == f"results of lake · {SIMULATED}"


def test_a_run_of_another_policy_is_not_called_simulated(tmp_path: Path) -> None:
    said = played(tmp_path, "policy: {kind: oracle}") + rollwright("show", "runs/lake", folder=tmp_path)
    assert SIMULATED not in said
    assert "is not set" not in said


def test_a_team_is_simulated_if_one_of_its_agents_is() -> None:
    team = {
        "kind": "loop",
        "acts": "player",
        "agents": {"player": {"prompt": "{observation}", "policy": "real"}},
    }
    settings = {
        "policies": {"real": {"kind": "oracle"}},
        "train_env_manager": {"num_env_groups": 1, "group_size": 1, "tags": ["FrozenLake"]},
    }
    assert not build({**settings, "orchestras": {"FrozenLake": team}}).plays_simulated
    team["agents"]["other"] = {"prompt": "{observation}"}  # type: ignore[index]
    assert build({**settings, "orchestras": {"FrozenLake": team}}).plays_simulated
