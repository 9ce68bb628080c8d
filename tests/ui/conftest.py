"""Runs to look at, a server over them, and a browser; each is made once."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    """A module beside the tests, which are no package."""
    known = sys.modules.get(f"ui_tests_{name}")
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(f"ui_tests_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"ui_tests_{name}"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make() -> ModuleType:
    """Makes runs: `runs.py`."""
    return _load("runs")


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory, make: ModuleType) -> Path:
    """A folder with a finished run, one of trees, one of a team, a swarm node, an evaluation, a damaged one and a hostile one."""
    runs: Path = tmp_path_factory.mktemp("ui") / "runs"
    make.play(make.LAKE, runs)
    make.play(make.TREE, runs)
    make.play(make.TEAM, runs)
    make.swarm_node(runs / "node")
    make.damaged(runs / "damaged")
    make.hostile(runs / "hostile")
    make.evaluation(runs / "exam")
    return runs


@pytest.fixture(scope="session")
def serving() -> ModuleType:
    """Serves pages in a thread: `serving.py`."""
    return _load("serving")


@pytest.fixture(scope="session")
def page(played: Path, serving: ModuleType) -> Iterator[str]:
    """Address of the page over `played`."""
    with serving.serving([str(played)]) as url:
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    module = _load("browser")
    if (why := module.why_not()) is not None:
        pytest.skip(why)
    with module.Browser() as opened:
        yield opened
