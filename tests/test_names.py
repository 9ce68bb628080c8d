"""A public class name stands once in the package, and every `module:name` that the package keeps as text can be imported."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from rollwright.registry import import_object

PACKAGE = Path(__file__).parent.parent / "src" / "rollwright"
SOURCES = sorted(PACKAGE.rglob("*.py"))

TARGET = re.compile(r"rollwright(?:\.[a-z_0-9]+)+:[A-Za-z_]\w*")


def test_a_public_class_name_stands_once() -> None:
    places = defaultdict(list)
    for file in SOURCES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(PACKAGE)))
    assert len(places) > 500
    assert not {name: files for name, files in places.items() if len(files) > 1}


def targets() -> list[str]:
    found = set()
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and TARGET.fullmatch(node.value)
            ):
                found.add(node.value)
    found.remove("rollwright.store.sql:migrations")  # a folder, in alembic's notation
    return sorted(found)


@pytest.mark.parametrize("target", targets())
def test_a_target_that_is_kept_as_text_can_be_imported(target: str) -> None:
    assert import_object(target) is not None
