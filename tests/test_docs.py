"""What the documentation says is so: its code runs, its settings load, and whatever it names exists."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest
import typer.main
import yaml

from rollwright.cli.main import app
from rollwright.config import build, load

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md"))]
}

RUN_ELSEWHERE = {
    "docs/environments.md": "tests/envs/test_environments_page.py",
    "docs/policies.md": "tests/engines/test_docs_of_policies.py",
}
"""Pages whose Python is run by a test of their own."""

ROWS = {"A": 12, "B": 12, "C": 9, "D": 5, "E": 10}
"""The rows of what the system must do: A1 to A12, and so on."""

TOP_LEVEL = ("src", "tests", "docs", "bench", "configs", "examples")

SOME_ENVIRONMENTS = {"train_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]}}
"""What a part of a configuration needs beside it to be a whole one."""


def blocks(language: str) -> list[tuple[str, str]]:
    """All code blocks in one language, with the page each is on."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page, block) for page, text in PAGES.items() for block in fence.findall(text)]


def inline(pattern: str) -> list[tuple[str, str]]:
    """What stands in backticks and matches, with the page it is on."""
    return sorted(
        {(page, found) for page, text in PAGES.items() for found in re.findall(rf"`({pattern})`", text)}
    )


@cache
def functions_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_pages_programs_settings_and_commands_to_look_at() -> None:
    """Otherwise the tests below would pass over nothing."""
    assert min(len(PAGES), len(PROGRAMS), len(blocks("yaml")), len(commands())) >= 10


PROGRAMS = [(page, program) for page, program in blocks("python") if page not in RUN_ELSEWHERE]


@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=[page for page, _ in PROGRAMS])
def test_the_python_on_a_page_runs_as_it_stands(page: str, program: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_pages_that_are_run_elsewhere_are_run_there() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "block"), blocks("yaml"))
def test_the_settings_on_a_page_are_accepted(page: str, block: str) -> None:
    build({**SOME_ENVIRONMENTS, **yaml.safe_load(block)}, source=page)


def commands() -> list[list[str]]:
    """The words of every `rollwright` command that a page shows."""
    lines = [line for _, block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    shown = [line[2:] for line in lines] + [found for _, found in inline(r"rollwright [a-z][^`]*")]
    words = [shlex.split(line, comments=True) for line in shown]
    return [each[1:] for each in words if each and each[0] == "rollwright"]


def test_the_commands_on_the_pages_exist_and_their_settings_are_accepted() -> None:
    top = typer.main.get_command(app)
    options = {name for option in top.params for name in option.opts}
    known = {*top.commands, *options}  # type: ignore[attr-defined]
    for command, *arguments in commands():
        assert command in known, command
        if command == "run" and arguments and (ROOT / arguments[0]).is_file():
            load(ROOT / arguments[0], [each for each in arguments[1:] if "=" in each and "…" not in each])


def test_every_file_that_a_page_names_exists() -> None:
    named = inline(rf"(?:{'|'.join(TOP_LEVEL)})/[\w./-]*\w/?")
    assert len(named) > 10
    missing = [(page, name) for page, name in named if not (ROOT / name).exists()]
    assert not missing


def test_every_program_that_a_page_tells_to_run_exists() -> None:
    named = {found for text in PAGES.values() for found in re.findall(r"python (\w[\w/]*\.py)", text)}
    assert named
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_every_link_leads_somewhere() -> None:
    links = [
        (page, target)
        for page, text in PAGES.items()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        if "://" not in target
    ]
    assert len(links) > 10
    assert not [(page, target) for page, target in links if not ((ROOT / page).parent / target).exists()]


def test_every_page_is_linked_from_the_first_one() -> None:
    for page in PAGES:
        assert page == "README.md" or f"({page})" in PAGES["README.md"], page


def test_every_test_that_a_page_names_exists() -> None:
    named = inline(r"tests/[\w/]+\.py::\w+")
    assert len(named) > 30
    for page, name in named:
        file, test = name.split("::")
        assert (ROOT / file).is_file(), (page, name)
        assert test in functions_in(ROOT / file), (page, name)


LOADED_BY_OTHERS = "rollwright.run.verl_agent_loop"
"""Made for verl, which is no dependency, and imports it."""


def test_every_name_of_the_package_that_a_page_uses_can_be_imported() -> None:
    named = {
        (page, name)
        for page, text in PAGES.items()
        for name in re.findall(r"\brollwright(?:\.\w+)+", re.sub(r"(?ms)^```diff$.*?^```", "", text))
    }
    assert named
    table = re.findall(r"^\| (rollwright\.\w+) \|", PAGES["docs/plugging_in.md"], re.MULTILINE)
    groups = set(table)  # entry-point groups, which are names of no module
    for page, name in named:
        if name.startswith(LOADED_BY_OTHERS):
            assert (ROOT / "src" / f"{LOADED_BY_OTHERS.replace('.', '/')}.py").is_file()
            continue
        if name in groups:
            continue
        try:
            resolve_name(name)
        except (ImportError, AttributeError) as error:
            pytest.fail(f"{page}: {name}: {error}")


def test_every_capability_has_its_row_and_what_is_there_has_its_test() -> None:
    table = re.findall(r"^\| ([A-E]\d+) \|(.*)\|$", PAGES["docs/capabilities.md"], re.MULTILINE)
    assert [row for row, _ in table] == [
        f"{letter}{number}" for letter, count in ROWS.items() for number in range(1, count + 1)
    ]
    for row, cells in table:
        what, state, where, test = (cell.strip() for cell in cells.split("|"))
        assert what, row
        assert state in ("there", "part", "not yet"), row
        assert ("::" in test) == (state != "not yet"), row
        assert where or state == "not yet", row


@pytest.mark.parametrize("page", ["configuration.md", "plugging_in.md", "benchmarks.md"])
def test_a_generated_page_says_what_its_source_says(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == generator().PAGES[page](), "run `make docs`"


def test_the_page_of_benchmarks_can_be_made_without_figures(tmp_path: Path) -> None:
    page = generator().benchmarks(tmp_path)
    assert page.count("There are no figures yet.") == len(generator().REPORTS)
