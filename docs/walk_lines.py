"""Line numbers of the functions that a page names: `path/to/file.py:123` `Class.function`.

A walk on a page is a list whose lines name a function and where it stands. The numbers follow from the sources, so
`make docs` writes them and nobody keeps them by hand.
"""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

NAMED = re.compile(r"`(?P<file>[\w./-]+\.py):(?P<line>\d+)` `(?P<name>[\w.]+)`")
"""A function as a walk names it."""


class NoSuchFunction(Exception):
    """A page names a function that its file does not have."""


@cache
def def_lines(file: Path) -> dict[str, int]:
    """The line of each `def` in a file, by its qualified name: `function`, `Class.method`."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{prefix}{child.name}"] = child.lineno
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try):
                visit(child, prefix)

    visit(ast.parse(file.read_text(encoding="utf-8")), "")
    return found


def refresh(text: str, root: Path = ROOT) -> str:
    """The page with the line numbers that are right now."""

    def now(match: re.Match[str]) -> str:
        file, name = match["file"], match["name"]
        lines = def_lines(root / file) if (root / file).is_file() else {}
        if name not in lines:
            raise NoSuchFunction(f"{file}: has no function {name}; accepted: function or Class.method")
        return f"`{file}:{lines[name]}` `{name}`"

    return NAMED.sub(now, text)
