import subprocess
import sys
from types import SimpleNamespace

import pytest

from rollwright.envs import registry
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.envs.registry import EnvSpec
from rollwright.errors import ConfigError


class Echo:
    """Echoes the answer."""

    instruction = "Say something."
    prompts = PromptTemplates("", "{observation}", "{observation}")

    def __init__(self, *, shout: bool = False, greeting: str = "hello") -> None:
        self._shout = shout
        self._greeting = greeting

    async def reset(self, seed: int) -> Reset:
        return Reset(f"{self._greeting} {seed}", {})

    async def step(self, answer: str) -> Step:
        return Step(answer.upper() if self._shout else answer, 0.0, False, False, {})

    async def close(self) -> None:
        pass


def test_the_four_games_are_there_with_their_limits() -> None:
    for tag in ("FrozenLake", "SimpleSokoban", "LargerSokoban", "SokobanDifferentGridVocab"):
        assert tag in registry.tags()
        spec = registry.spec(tag)
        assert (spec.tag, spec.max_steps, spec.max_tokens_per_step) == (tag, 10, 128)
        assert spec.description


def test_every_named_tag_has_a_spec() -> None:
    assert [registry.spec(tag).tag for tag in registry.tags()] == registry.tags()


async def test_settings_of_the_tag_hold_unless_others_are_given() -> None:
    shown = (await registry.make("LargerSokoban").reset(0)).observation
    assert len(shown.split("\n")) == 10
    shown = (await registry.make("LargerSokoban", {"dim_room": [7, 8]}).reset(0)).observation
    assert [len(row) for row in shown.split("\n")] == [8] * 7
    assert shown.count("X") == 2


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("frozenlake", "did you mean 'FrozenLake'"),
        ("SimpleSokobann", "did you mean 'SimpleSokoban'.*known: FrozenLake, LargerSokoban"),
        ("", "unknown environment ''"),
        ("gymnasium:", "unknown environment"),
        ("no_such_module:Env", "no module named 'no_such_module'"),
        ("rollwright.no_such:Env", "no module named 'rollwright.no_such'"),
        ("gymnasum:Taxi-v4", "did you mean 'gymnasium'"),
        ("math:tau", "is not callable"),
        ("math:Env", "has no 'Env'"),
        ("collections:Counter", "Counter is not an environment; it needs instruction"),
    ],
)
def test_an_unknown_tag_is_one_clear_line(tag: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        registry.make(tag)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tag", "config", "words"),
    [
        (
            "FrozenLake",
            {"is_slipery": True},
            "unknown setting 'is_slipery' .did you mean 'is_slippery'.*accepted: size",
        ),
        ("FrozenLake", {"size": "4"}, "environment FrozenLake: size: expected int, got str"),
        ("FrozenLake", {"is_slippery": 1}, "is_slippery: expected bool, got int"),
        ("FrozenLake", {"size": 1}, "environment FrozenLake: size must be 2 or more"),
        ("LargerSokoban", {"dim_room": [6]}, "dim_room: expected array of length 2"),
        ("SimpleSokoban", {"grid_vocab": {"wall": 3}}, "grid_vocab: expected str, got int"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(tag: str, config, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        registry.make(tag, config)
    assert "\n" not in str(caught.value)


@pytest.fixture
def own_module(monkeypatch):
    """A user's module with environments."""

    def needy(*, data: str) -> Echo:
        return Echo(greeting=data)

    module = SimpleNamespace(Echo=Echo, needy=needy)
    monkeypatch.setitem(sys.modules, "own_envs", module)
    return module


async def test_a_factory_of_ones_own_is_found_by_its_path(own_module) -> None:
    env = registry.make("own_envs:Echo", {"shout": True})
    assert (await env.reset(3)).observation == "hello 3"
    assert (await env.step("hey")).observation == "HEY"
    assert registry.spec("own_envs:Echo").max_steps == 10
    with pytest.raises(ConfigError, match="did you mean 'shout'"):
        registry.make("own_envs:Echo", {"shoot": True})
    with pytest.raises(ConfigError, match="needs the setting 'data'"):
        registry.make("own_envs:needy")


async def test_a_registered_environment_is_found_and_its_name_is_taken_until_it_is_removed(request) -> None:
    registry.register(EnvSpec("Echo", "says what it hears", Echo, {"greeting": "hi"}, max_steps=3))
    request.addfinalizer(lambda: registry.ENVIRONMENTS.unregister("Echo"))
    assert "Echo" in registry.tags()
    assert registry.spec("Echo").max_steps == 3
    assert (await registry.make("Echo").reset(1)).observation == "hi 1"
    for tag in ("Echo", "FrozenLake"):
        with pytest.raises(ConfigError, match="is taken"):
            registry.register(EnvSpec(tag, "again", Echo))
    with pytest.raises(ConfigError, match="without ':'"):
        registry.register(EnvSpec("a:b", "a path", Echo))
    registry.ENVIRONMENTS.unregister("Echo")
    assert "Echo" not in registry.tags()
    with pytest.raises(ConfigError, match="'FrozenLake': was not registered"):
        registry.ENVIRONMENTS.unregister("FrozenLake")
    registry.register(EnvSpec("Echo", "a changed one", Echo))


@pytest.fixture
def installed_packages(tmp_path, monkeypatch):
    """Two packages that offer environments through entry points."""
    for name, lines in {
        "one": ["Whisper = package_envs:Whisper", "Spec = package_envs:SPEC", "Both = package_envs:Whisper"],
        "two": ["Both = package_envs:SPEC"],
    }.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[rollwright.envs]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    offered = SimpleNamespace(Whisper=Echo, SPEC=EnvSpec("ignored", "from a package", Echo, max_steps=5))
    monkeypatch.setitem(sys.modules, "package_envs", offered)
    registry.ENVIRONMENTS.refresh()
    yield
    registry.ENVIRONMENTS.refresh()


@pytest.mark.usefixtures("installed_packages")
async def test_installed_packages_offer_environments_by_entry_point() -> None:
    assert {"Whisper", "Spec", "FrozenLake"} <= set(registry.tags())
    assert registry.spec("Whisper").description == "Echoes the answer."
    assert (await registry.make("Whisper").reset(2)).observation == "hello 2"
    spec = registry.spec("Spec")
    assert (spec.tag, spec.description, spec.max_steps) == ("Spec", "from a package", 5)
    with pytest.raises(ConfigError, match="offered by more than one package"):
        registry.spec("Both")


def test_looking_up_and_playing_the_games_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from rollwright.envs import registry\n"
        "registry.tags(), registry.make('FrozenLake'), registry.make('LargerSokoban')\n"
        "registry.spec('gymnasium:Taxi-v4'), registry.spec('reasoning_gym:sudoku')\n"
        "heavy = {'numpy', 'gymnasium', 'reasoning_gym', 'pydantic', 'aiohttp', 'torch'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or None)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
