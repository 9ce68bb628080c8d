"""A command loads what it needs and no more, so that it answers at once; and the shell completes what one types.

Modules are counted and not seconds: these are the same on every machine.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rollwright.cli.main import COMMANDS, app

COMMAND = """
import atexit, sys
from pathlib import Path
atexit.register(lambda: Path("loaded").write_text("\\n".join(sys.modules)))
sys.argv = ["rollwright", *sys.argv[1:]]
from rollwright.cli.entry import main
main()
"""
"""The `rollwright` script; at its end, the file `loaded` has the names of all modules."""

CONFIG = """
name: lake
policy: {kind: random}
train_env_manager: {num_env_groups: 2, group_size: 2, tags: [FrozenLake]}
"""

ENGINES = {"torch", "transformers", "numpy", "ray", "aiohttp", "uvloop"}
STORES = {"sqlalchemy", "alembic", "fastapi", "uvicorn"}
SETTINGS = {"omegaconf", "yaml", "rollwright.config"}
PLAYING = {
    "rollwright.run.run",
    "rollwright.rollout.scheduler",
    "rollwright.agents.session",
    "rollwright.rollout.worker",
}
ENVIRONMENTS = {"gymnasium", "reasoning_gym", "rollwright.envs"}
EVERYTHING = ENGINES | STORES | SETTINGS | PLAYING | ENVIRONMENTS


def loaded_by(*words: str, folder: Path) -> tuple[set[str], str]:
    """The modules that a command loads, and what it says."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=120
    )
    return set((folder / "loaded").read_text().splitlines()), done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and its finished run."""
    place = tmp_path_factory.mktemp("startup")
    (place / "lake.yaml").write_text(CONFIG, encoding="utf-8")
    loaded, said = loaded_by("run", "lake.yaml", folder=place)
    assert "results: runs/lake" in said
    assert loaded >= PLAYING  # else the names below say nothing
    return place


@pytest.mark.parametrize(
    ("words", "absent", "says"),
    [
        (["--help"], {*EVERYTHING, "pydantic", "msgspec", "asyncio"}, "Show a store's rollouts"),
        (["--version"], {*EVERYTHING, "pydantic", "msgspec", "asyncio", "rich"}, "rollwright 0"),
        (["envs"], EVERYTHING - {"rollwright.envs"}, "SimpleSokoban"),
        (["show", "runs/lake"], EVERYTHING - {"yaml"}, "results of lake"),
        (["run", "--help"], EVERYTHING, "CONFIG"),
        (["train", "--help"], EVERYTHING, "CONFIG"),
        (["run", "none.yaml"], EVERYTHING - SETTINGS, "none.yaml: cannot be read"),
        (["run", "lake.yaml", "polcy.kind=oracle"], EVERYTHING - SETTINGS, "did you mean `policy`?"),
        (["run", "lake.yaml", "max_steps=many"], EVERYTHING - SETTINGS, "max_steps: got 'many'"),
        (["train", "lake.yaml", "max_steps=many"], EVERYTHING - SETTINGS, "max_steps: got 'many'"),
        (["show", "runs/none"], EVERYTHING - {"yaml"}, "there is no such file or folder"),
        (["nonsense"], EVERYTHING, "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_loads_no_more_than_it_needs(
    folder: Path, words: list[str], absent: set[str], says: str
) -> None:
    loaded, said = loaded_by(*words, folder=folder)
    assert says in said
    assert not absent & loaded


def test_every_command_is_there_and_its_line_of_help_begins_its_own_page() -> None:
    group = typer.main.get_command(app)
    context = typer.Context(group)
    for name, command in COMMANDS.items():
        _, loaded, _ = group.resolve_command(context, [name])  # type: ignore[attr-defined]
        assert loaded.name == name
        assert " ".join((loaded.help or "").split()).startswith(command.help.removesuffix(".")), name


def completed(folder: Path, words: str) -> set[str]:
    """What bash offers for the last of the words."""
    asked = {
        **os.environ,
        "_ROLLWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], cwd=folder, capture_output=True, text=True, env=asked, timeout=120
    )
    return set(done.stdout.split())


def test_the_shell_completes_commands_tags_run_folders_and_files(folder: Path) -> None:
    assert completed(folder, "rollwright pl") == {"play", "plot"}
    assert completed(folder, "rollwright swarm st") == {"status"}
    assert completed(folder, "rollwright play Larger") == {"LargerSokoban"}
    assert completed(folder, "rollwright show ") >= {"runs/lake"}
    assert completed(folder, "rollwright resume runs/l") == {"runs/lake"}
    assert completed(folder, "rollwright run la") == {"lake.yaml"}
    assert completed(folder, "rollwright run lake.yaml --wor") == {"--workers"}


def test_completion_of_a_command_loads_no_command(folder: Path) -> None:
    assert "show" in completed(folder, "rollwright sh")
    assert not EVERYTHING & set((folder / "loaded").read_text().splitlines())


def test_completion_can_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["--install-completion", "bash"], prog_name="rollwright")
    assert done.exit_code == 0, done.output
    scripts = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any("_ROLLWRIGHT_COMPLETE" in file.read_text(encoding="utf-8") for file in scripts)


def test_a_command_ends_without_looking_at_all_its_objects_again_and_with_its_exit_handlers() -> None:
    program = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000))\n"
        "sys.argv = ['rollwright', '--version']\n"
        "from rollwright.cli.entry import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "frozen True True"
