"""What a user plugs in by `module:name` works from YAML, and an error in it is one line that names it."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollwright.config import build, load
from rollwright.engines.factory import build_policy
from rollwright.errors import ConfigError, RollwrightError
from rollwright.registry import Registry
from rollwright.rollout.curriculum import make_curriculum
from rollwright.rollout.filters import build_filters
from rollwright.run.build import build_strategy
from rollwright.run.build_swarm import open_transport, swarm_of
from rollwright.run.build_training import make_training_advantage
from rollwright.run.run import Run
from rollwright.store.opening import STORES, open_store
from rollwright.swarm.identity import Identity
from rollwright.training.metrics import Metrics

ROOT = Path(__file__).parents[1]

MINE = """
from rollwright.simulation.players import OraclePlayer
from rollwright.rollout.curriculum import Curriculum
from rollwright.store.memory import MemoryStore
from rollwright.swarm.transports.memory import MemorySwarm

def same(groups, *, value=1.0):
    return [[[value] * len(each.turns) for each in group] for group in groups]

def broken(*arguments, **options):
    raise KeyError("a mistake of mine")

class Policy(OraclePlayer):
    def __init__(self, *, luck: float = 0.5):
        super().__init__()
        self.luck = luck

class NoPolicy:
    pass

class Short:
    name = "short"
    def __init__(self, least: int = 3):
        self.least = least
    def catches_turn(self, turn):
        return len(turn.text) < self.least

class Levels(Curriculum):
    pass

def three(node):
    return 3

async def transport(settings, peer, *, clock, room: int = 1):
    joined = MemorySwarm().join(peer)
    joined.room = room
    return joined

class Writer:
    written = []
    def __init__(self, folder, resume_at=None):
        self.folder = folder
    def write(self, step, figures):
        if step > 1:
            raise OSError("full")
        self.written.append((step, dict(figures)))
    def forget(self, step): ...
    def close(self): ...

async def open_mine(address, **options):
    return MemoryStore()
"""

LAKE = {"num_env_groups": 1, "group_size": 2, "tags": ["FrozenLake"]}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's own, in a folder that Python imports from."""
    (tmp_path / "my_parts.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_parts")
    sys.modules.pop("my_parts", None)


def from_yaml(folder: Path, text: str) -> Any:
    (folder / "run.yaml").write_text(text)
    return load(folder / "run.yaml")


async def test_a_run_is_played_by_a_policy_of_ones_own(mine: ModuleType, tmp_path: Path) -> None:
    config = from_yaml(
        tmp_path,
        "policy: {kind: 'my_parts:Policy', options: {luck: 0.9}}\n"
        "train_env_manager: {num_env_groups: 1, group_size: 2, tags: [FrozenLake], filters: ['my_parts:Short']}\n"
        "strategy: {kind: tree, width: 2, depth: 1, branch: 'my_parts:three'}\n",
    )
    assert build_policy(config.policy).luck == 0.9  # type: ignore[attr-defined]
    assert build_filters(config.train_env_manager)[0].name == "short"
    assert build_strategy(config.strategy).branching.rules.function == "my_parts:three"  # type: ignore[attr-defined]
    async with Run(config) as run:
        assert len((await run.get_batch()).trajectories) == 2


def test_advantages_losses_and_writers_of_ones_own_train(mine: ModuleType, tmp_path: Path) -> None:
    config = from_yaml(
        tmp_path,
        "training: {advantage: {name: 'my_parts:same', options: {value: 2.0}}, writers: ['my_parts:Writer']}\n",
    )
    assert make_training_advantage(config.training)([]) == []
    metrics = Metrics(tmp_path, config.training.writers)
    metrics.write(1, {"loss": 0.5})
    assert mine.Writer.written == [(1, {"loss": 0.5})]
    with pytest.raises(RollwrightError, match="metrics my_parts:Writer: raised OSError: full"):
        metrics.write(2, {"loss": 0.5})


def test_a_loss_of_ones_own_gets_the_tokens(mine: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    from rollwright.training.losses import token_losses

    mine.plain = lambda new, engine, advantages, settings, **more: -advantages * new * settings.clip_low
    new = torch.ones(2, requires_grad=True)
    settings = build({"training": {"loss": {"name": "my_parts:plain", "clip_low": 0.5}}}).training
    assert settings is not None
    found = token_losses(new, torch.zeros(2), torch.tensor([1.0, 2.0]), settings.loss)
    assert found.losses.tolist() == [-0.5, -1.0]
    wrong = settings.loss.model_copy(update={"name": "my_parts:broken"})
    with pytest.raises(RollwrightError, match=r"loss my_parts:broken: raised KeyError: 'a mistake of mine'"):
        token_losses(new, new, new, wrong)


async def test_curricula_transports_and_stores_of_ones_own_are_used(
    mine: ModuleType, request: pytest.FixtureRequest
) -> None:
    manager = build(
        {"train_env_manager": {**LAKE, "curriculum": {"name": "my_parts:Levels"}}}
    ).train_env_manager
    assert manager is not None
    assert manager.curriculum is not None
    assert make_curriculum(manager.curriculum, ["a"]).tag("a") == "a@0"
    told = {"communication": {"transport": "my_parts:transport", "options": {"room": 7}}}
    assert (await open_transport(swarm_of(build({"swarm": told})), Identity.generate())).room == 7  # type: ignore[attr-defined]
    STORES.register("mine", "my_parts:open_mine")
    request.addfinalizer(lambda: STORES.unregister("mine"))
    await (await open_store("mine://somewhere")).close()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"policy": {"kind": "my_parts:NoPolicy"}},
            "policy my_parts:NoPolicy: a NoPolicy has no generate, close",
        ),
        (
            {"policy": {"kind": "my_parts:broken"}},
            "policy my_parts:broken: raised KeyError: 'a mistake of mine'",
        ),
        ({"policy": {"kind": "my_parts:nothing"}}, "policy my_parts:nothing: cannot be imported"),
        (
            {"policy": {"kind": "my_parts:Policy", "options": {"lucky": 1}}},
            "policy my_parts:Policy: unknown setting 'lucky' .did you mean 'luck'",
        ),
        ({"policy": {"kind": "simulatd"}}, "policy.kind: unknown `simulatd` .did you mean `simulated`"),
        (
            {"swarm": {"communication": {"transport": "zeno"}}},
            "swarm.communication.transport: unknown `zeno` .did you mean `zenoh`",
        ),
        ({"training": {"writers": ["json"]}}, "training.writers.0: unknown `json` .did you mean `jsonl`"),
        (
            {"train_env_manager": {**LAKE, "filters": ["zero_varianc"]}},
            "train_env_manager.filters.0.kind: unknown `zero_varianc` .did you mean `zero_variance`",
        ),
    ],
)
def test_what_is_wrong_with_a_part_is_one_line_that_names_it(
    mine: ModuleType, content: dict[str, Any], words: str
) -> None:
    with pytest.raises(RollwrightError, match=words) as caught:
        build_policy(build(content).policy)
    assert "\n" not in str(caught.value)


def test_an_advantage_that_fails_on_a_batch_is_named(mine: ModuleType) -> None:
    training = build({"training": {"advantage": "my_parts:broken"}}).training
    assert training is not None
    with pytest.raises(RollwrightError, match="advantage my_parts:broken: raised KeyError"):
        make_training_advantage(training)([])


def test_a_package_offers_parts_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "offers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollwright.pastries]\ntart = math:tau\n")
    monkeypatch.syspath_prepend(tmp_path)
    pastries: Registry[Any] = Registry("pastries", "pastry", {"bun": "math:pi"}, protocol="a:B", key="pastry")
    assert pastries.names() == ["bun", "tart"]
    assert pastries.find("tart") > pastries.find("bun")
    with pytest.raises(
        ConfigError, match=r"pastry: unknown `tarte` \(did you mean `tart`\?\); known: bun, tart"
    ):
        pastries.find("tarte")
    with pytest.raises(ConfigError, match="the name is taken"):
        pastries.register("tart", "math:e")


def registries() -> set[str]:
    """Every `NAME: Registry[…] = Registry(…)` of the package."""
    found = set()
    for file in (ROOT / "src" / "rollwright").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Registry["):
                module = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(
                    ".__init__"
                )
                found.add(f"{module}:{ast.unparse(node.target)}")
    return found


def test_the_page_of_plug_points_names_every_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location("plug_points", ROOT / "docs" / "plug_points.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.REGISTRIES) == registries()


@pytest.mark.parametrize("path", sorted(registries()))
def test_every_built_in_kind_and_protocol_can_be_imported(path: str) -> None:
    from rollwright.registry import import_object

    registry = import_object(path)
    assert import_object(registry.protocol) is not None
    for name in registry.kinds:
        assert registry.find(name) is not None
