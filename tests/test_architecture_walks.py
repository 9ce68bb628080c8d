"""The walks in `docs/architecture.md` lead through the code as it is: each named function stands on the named line."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"


def _walk_lines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("walk_lines", ROOT / "docs" / "walk_lines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


walk_lines = _walk_lines()


def walks() -> dict[str, list[tuple[str, int, str]]]:
    """File, line and function of each step, by the walk's title."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Four walks\n")[2].partition("\n## ")[0]
    found = {}
    for part in section.split("\n### ")[1:]:
        title, _, text = part.partition("\n")
        steps = walk_lines.NAMED.finditer(text)
        found[title] = [(each["file"], int(each["line"]), each["name"]) for each in steps]
    return found


STEPS = [step for steps in walks().values() for step in steps]


def test_there_are_walks_of_about_ten_steps_each() -> None:
    found = walks()
    assert {"One rollout", "One engine call"} <= found.keys()
    assert all(5 <= len(steps) <= 12 for steps in found.values()), found


@pytest.mark.parametrize(("file", "line", "name"), STEPS, ids=[f"{file}:{name}" for file, _, name in STEPS])
def test_each_step_names_the_line_of_its_functions_def(file: str, line: int, name: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8").splitlines()[line - 1].strip()
    assert text.removeprefix("async ").startswith(f"def {name.rpartition('.')[2]}("), (
        f"{file}:{line} is not {name}; `make docs` refreshes the line numbers"
    )
    assert walk_lines.def_lines(ROOT / file)[name] == line


def test_a_line_number_that_is_out_of_date_is_corrected(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "import x\n\n\nclass A:\n    @x.y\n    async def go(self):\n        pass\n"
    )
    assert walk_lines.refresh("1. `code.py:1` `A.go` goes.", tmp_path) == "1. `code.py:6` `A.go` goes."


def test_a_function_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def stay():\n    pass\n")
    with pytest.raises(walk_lines.NoSuchFunction, match=r"code\.py: has no function gone"):
        walk_lines.refresh("`code.py:1` `gone`", tmp_path)
