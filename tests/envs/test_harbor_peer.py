"""Twelve task folders × oracle and nop: the rewards that `harbor run` gives, error for error.

`tests/data/harbor/rewards.json` holds what Harbor 0.24 gave. Tasks that need only bubblewrap are compared with it by default; `make
test-boxes` builds the others, too, and asks Harbor itself again, in a virtual environment of its own, with podman.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.harbor.environment import HarborEnv
from rollwright.sandbox.attempts import AttemptBoxes, use_boxes
from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.box import BoxLabel
from rollwright.sandbox.building import add_folder, engine_environment
from rollwright.sandbox.leases import STATE_VARIABLE
from rollwright.sandbox.pool import BoxPool

TASKS = Path(__file__).parents[1] / "data" / "harbor"
HARBOR: dict[str, dict[str, Any]] = json.loads((TASKS / "rewards.json").read_text())
PLAYERS = ("oracle", "nop")
NEED_ENGINE = {"dockerfile", "own-verifier"}
"""Tasks whose images are built."""

IMAGE = "docker.io/rollwright/base:1"
"""Not of `localhost`: Harbor removes such images when it is done."""

PACKAGES = ("harbor==0.24.0", "podman-compose==1.6.0")
PROGRAMS = (
    "bash sh cat ls chmod chown mkdir rm rmdir echo env sleep tar gzip test timeout id grep head tail tr seq nohup touch mv cp "
    "ln date stat find sort wc dirname basename printf true false sed mktemp hostname perl cut"
)


@pytest.fixture(scope="module")
def base_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system from programs of this machine: what a small Debian image has."""
    root = tmp_path_factory.mktemp("base")
    for name in (
        "usr/bin",
        "usr/lib",
        "usr/lib64",
        "etc",
        "tmp",
        "proc",
        "dev",
        "sys",
        "root",
        "home/agent",
        "var/log",
    ):
        (root / name).mkdir(parents=True)
    for link, target in (("bin", "usr/bin"), ("sbin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
        (root / link).symlink_to(target)
    for name in PROGRAMS.split():
        if (found := shutil.which(name)) is None:
            pytest.skip(f"the image of these tasks needs the program {name}")
        shutil.copy(Path(found).resolve(), root / "usr/bin" / name)
        for word in subprocess.run(["ldd", found], capture_output=True, text=True).stdout.split():
            if word.startswith("/"):
                (root / word.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, root / word.lstrip("/"))
    for library in Path("/usr/lib").glob("*/perl-base"):
        shutil.copytree(library, root / str(library).lstrip("/"))
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    )
    (root / "etc/group").write_text("root:x:0:\nagent:x:1000:\n")
    (root / "tmp").chmod(0o1777)
    return root


@pytest.fixture(scope="module")
def state(base_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of boxes whose store has the image of the tasks."""
    folder = tmp_path_factory.mktemp("state")
    add_folder(folder, base_files, IMAGE)
    return folder


@pytest.fixture
async def pool(state: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BoxPool]:
    monkeypatch.setenv(STATE_VARIABLE, str(state))
    monkeypatch.setenv("ROLLWRIGHT_TEST_KEY", "given-key")
    backend = make_backend("bubblewrap")
    if why := await check_backend(backend):
        await backend.aclose()
        pytest.skip(f"bubblewrap does not run here: {why}")
    made = BoxPool(backend)
    yield made
    await made.aclose()


async def play(name: str, player: str, pool: BoxPool) -> Any:
    """The rewards of a task, by name, or `error`."""
    with use_boxes(AttemptBoxes(pool, BoxLabel(rollout_id=name))):
        env = HarborEnv(str(TASKS / name))
        try:
            await env.reset(0)
            while True:
                action = env.best_action() if player == "oracle" else env.actions()[0]
                step = await env.step(env.answer(action or ""))
                if step.terminated:
                    found = step.info["metrics"]
                    return {key.removeprefix("verifier."): value for key, value in found.items()}
        except EnvironmentFailure as error:
            print(error)
            return "error"


@pytest.mark.parametrize("player", PLAYERS)
@pytest.mark.parametrize("name", sorted(set(HARBOR) - NEED_ENGINE))
async def test_a_task_gives_the_rewards_of_harbor(name: str, player: str, pool: BoxPool) -> None:
    if os.geteuid() != 0 and name in ("services", "users", "steps"):
        pytest.skip("this task needs several users, or services that share a network, and so root")
    assert await play(name, player, pool) == HARBOR[name][player]


@pytest.fixture(scope="module")
def engine(base_files: Path, state: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a podman with a store of its own, which has the image of the tasks."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    home = tmp_path_factory.mktemp("podman")
    (home / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{home}/graph"\nrunroot = "{home}/run"\n'
    )
    given = {**engine_environment(state), "CONTAINERS_STORAGE_CONF": str(home / "storage.conf")}
    packed = subprocess.run(["tar", "-C", str(base_files), "-c", "."], capture_output=True, check=True)
    made = subprocess.run(
        ["podman", "import", "-", IMAGE], input=packed.stdout, capture_output=True, env=given
    )
    if made.returncode != 0:
        pytest.skip(f"podman does not run here: {made.stderr.decode()[-300:]}")
    return given


@pytest.mark.boxes
@pytest.mark.parametrize("player", PLAYERS)
@pytest.mark.parametrize("name", sorted(NEED_ENGINE))
async def test_a_task_whose_image_is_built_gives_the_rewards_of_harbor(
    name: str, player: str, pool: BoxPool, engine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", engine["CONTAINERS_STORAGE_CONF"])
    assert await play(name, player, pool) == HARBOR[name][player]


def find_python() -> str:
    """An interpreter that Harbor can use: it needs Python 3.12."""
    home = Path.home() / ".pyenv" / "versions"
    candidates = [
        shutil.which("python3.12"),
        shutil.which("python3.13"),
        *map(str, sorted(home.glob("3.12.*/bin/python"))),
    ]
    for each in candidates:
        if each and subprocess.run([each, "-c", "import venv"], capture_output=True).returncode == 0:
            return each
    pytest.skip("Harbor needs Python 3.12, which is not installed")


def outcome(result: dict[str, Any]) -> Any:
    """Rewards of a trial, or `error`, also for one of its steps."""
    parts = [result, *(result.get("step_results") or ())]
    if any(each.get("exception_info") for each in parts) or not result.get("verifier_result"):
        return "error"
    return result["verifier_result"]["rewards"]


@pytest.mark.boxes
@pytest.mark.parametrize("player", PLAYERS)
def test_harbor_itself_gives_the_rewards_that_are_written_down(
    player: str, engine: dict[str, str], tmp_path: Path
) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    from venvs import peer_python

    python = peer_python("harbor", PACKAGES, interpreter=find_python())
    given = {
        **engine,
        "PATH": f"{python.parent}:{engine['PATH']}",
        "HOME": str(tmp_path),
        "ROLLWRIGHT_TEST_KEY": "given-key",
        "HARBOR_TELEMETRY": "off",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    words = ["harbor", "run", "-p", str(TASKS), "-e", "podman", "-a", player, "-o", str(tmp_path)]
    subprocess.run([*words, "--job-name", "job", "-q", "-y", "-n", "2"], env=given, capture_output=True)
    results = [json.loads(file.read_text()) for file in (tmp_path / "job").glob("*/result.json")]
    found = {each["task_name"].partition("/")[2]: outcome(each) for each in results}
    assert found == {name: players[player] for name, players in HARBOR.items()}
