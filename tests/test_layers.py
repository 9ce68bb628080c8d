"""The boxes depend on each other in one direction, and the core is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "rollwright"

FOUNDATION = {
    "errors",
    "rng",
    "aio",
    "lazy",
    "signals",
    "forks",
    "http",
    "addresses",
    "registry",
    "settings",
    "cache",
}
"""Modules that know nobody but each other, and that everybody may use."""

SETTINGS = "settings"
"""A box declares its settings in this module of its own, or in a package of this name. It imports no other part of any box, except for modules of its own
box of which the same is true. `config` may import the settings of every box, and nothing else of them."""

MAY_KNOW = {
    "errors": set(),
    "rng": set(),
    "aio": set(),
    "lazy": set(),
    "signals": set(),
    "http": set(),
    "forks": set(),
    "addresses": set(),
    "registry": set(),
    "settings": set(),
    "cache": set(),
    "trajectory": set(),
    "config": set(),
    "sandbox": {"hardware"},
    "envs": {"trajectory", "tools", "sandbox"},
    "hardware": set(),
    "models": {"hardware"},
    "engines": {"trajectory", "models", "hardware"},
    "simulation": {"trajectory", "envs", "engines", "sandbox"},
    "tools": {"trajectory", "engines", "sandbox"},
    "agents": {"trajectory", "envs", "engines", "sandbox", "tools"},
    "teams": {"trajectory", "envs", "engines", "simulation", "tools", "agents", "rollout"},
    "rewards": {"trajectory", "config", "envs", "engines", "sandbox"},
    "tasks": {"envs"},
    "store": {"trajectory"},
    "rollout": {
        "sandbox",
        "trajectory",
        "config",
        "envs",
        "engines",
        "agents",
        "rewards",
        "store",
        "gateway",
        "hardware",
    },
    "gateway": {"trajectory", "engines", "agents", "store"},
    "remote": set(),
    "training": {"trajectory", "engines", "models", "rollout", "hardware"},
    "evaluation": {"trajectory"},
    "api": {"config", "engines", "evaluation", "run", "trajectory"},
    "run": {
        "trajectory",
        "config",
        "hardware",
        "models",
        "envs",
        "engines",
        "simulation",
        "rewards",
        "tasks",
        "tools",
        "sandbox",
        "agents",
        "teams",
        "store",
        "rollout",
        "gateway",
        "training",
        "swarm",
        "evaluation",
    },
    "swarm": {"trajectory", "config", "envs", "engines", "agents", "rollout"},
    "doctor": {"config", "hardware", "models", "engines", "run", "sandbox", "swarm"},
    "observe": {
        "trajectory",
        "config",
        "hardware",
        "models",
        "engines",
        "evaluation",
        "rollout",
        "training",
        "run",
    },
    "ui": {"trajectory", "config", "store", "rollout", "training", "swarm", "run", "observe"},
    "cli": {
        "trajectory",
        "config",
        "envs",
        "engines",
        "tools",
        "agents",
        "teams",
        "store",
        "rollout",
        "models",
        "gateway",
        "training",
        "run",
        "evaluation",
        "swarm",
        "hardware",
        "doctor",
        "observe",
        "ui",
        "sandbox",
    },
}
"""Which boxes each box may import."""


PLAYED_OVER_HTTP = """
import asyncio
from rollwright.config import build
from rollwright.simulation.server_process import simulated_server
from rollwright.run.run import Run
from rollwright.store.http.client import HttpStore
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore


async def play():
    behind = MemoryStore()
    async with simulated_server() as engine, StoreServer(behind) as server:
        config = build(
            {
                "name": "light",
                "rollout_batch_size": 2,
                "policy": {"kind": "openai", "base_url": engine.base_url, "model": "m"},
                "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["FrozenLake"]},
            }
        )
        store = HttpStore(server.url)
        async with Run(config, store=store) as run:
            assert len((await run.get_batch()).trajectories) == 2
        await store.close()


asyncio.run(play())
"""
"""Rollouts against an engine over HTTP, from a store over HTTP."""


def imported_modules(file: Path) -> set[str]:
    """The modules of the package that a file imports, wherever in it, without `rollwright.` before their names."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [node.module] if node.module != "rollwright" else [f"rollwright.{a.name}" for a in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.removeprefix("rollwright.") for name in names if name.startswith("rollwright.")}
    return found - {"__version__"}


def is_settings(module: str) -> bool:
    return SETTINGS in module.split(".")[1:]


def test_every_box_is_placed() -> None:
    boxes = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert boxes - {"__init__", "__main__"} == set(MAY_KNOW)


@pytest.mark.parametrize("box", sorted(MAY_KNOW))
def test_imports_point_in_one_direction(box: str) -> None:
    place = PACKAGE / box
    files = [place.with_suffix(".py")] if place.with_suffix(".py").is_file() else list(place.rglob("*.py"))
    assert files
    for file in files:
        modules = imported_modules(file)
        if (
            box == "config" or "config" in MAY_KNOW[box]
        ):  # who knows the configuration knows what it is composed of
            modules = {each for each in modules if not is_settings(each)}
        foreign = {each.split(".")[0] for each in modules} - {box} - FOUNDATION - MAY_KNOW[box]
        assert not foreign, f"{file.relative_to(PACKAGE)} may not import {sorted(foreign)}"


SETTINGS_FILES = sorted([*PACKAGE.glob(f"*/{SETTINGS}.py"), *PACKAGE.glob(f"*/{SETTINGS}/*.py")])


@pytest.mark.parametrize("file", SETTINGS_FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_settings_of_a_box_know_nothing_but_other_settings(file: Path) -> None:
    box = file.relative_to(PACKAGE).parts[0]
    modules = {each for each in imported_modules(file) if each not in FOUNDATION and not is_settings(each)}
    beside = {each for each in modules if each.startswith(f"{box}.")}
    assert not modules - beside, f"{file.relative_to(PACKAGE)} may not import {sorted(modules - beside)}"
    for each in beside:
        beyond = imported_modules(PACKAGE / box / f"{each.split('.')[1]}.py") - FOUNDATION
        assert not beyond, f"{each}, which settings import, may not import {sorted(beyond)}"


def test_no_box_knows_itself_through_another() -> None:
    def reach(box: str, seen: frozenset[str] = frozenset()) -> set[str]:
        return {
            other for direct in MAY_KNOW[box] - seen for other in {direct} | reach(direct, seen | {direct})
        }

    assert not [box for box in MAY_KNOW if box in reach(box)]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "import rollwright",
            {
                *("torch", "ray", "sqlalchemy", "numpy", "gymnasium", "aiohttp", "pydantic", "msgspec"),
                *("psutil", "starlette", "huggingface_hub"),
            },
        ),
        (
            "import rollwright.run.run",
            {
                "huggingface_hub",
                "torch",
                "ray",
                "transformers",
                "pyarrow",
                "reasoning_gym",
                "gymnasium",
                "aiohttp",
            },
        ),
        (
            "import rollwright.config",
            {"torch", "ray", "transformers", "numpy", "sqlalchemy", "gymnasium", "aiohttp"},
        ),
        (PLAYED_OVER_HTTP, {"torch", "ray", "aiohttp", "httpx", "numpy"}),
        (
            "import rollwright.cli.main",
            {
                "huggingface_hub",
                "torch",
                "ray",
                "transformers",
                "pyarrow",
                "reasoning_gym",
                "aiohttp",
                "sqlalchemy",
                "numpy",
            },
        ),
    ],
)
def test_what_is_not_used_is_not_imported(statement: str, absent: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not absent & set(loaded)
