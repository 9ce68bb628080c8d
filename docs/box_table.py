"""The table of boxes on the architecture page, from the layer test and from the first line of each box's docstring."""

import ast
import re
import runpy
from pathlib import Path

from markdown_tables import table

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "rollwright"

SECTION = re.compile(r"(<!-- boxes -->\n).*?(<!-- /boxes -->)", re.S)
"""The part of the page that is generated."""


def holds(box: str) -> str:
    """The first sentence of a box's docstring, without the full stop."""
    file = PACKAGE / box / "__init__.py"
    text = (file if file.is_file() else PACKAGE / f"{box}.py").read_text(encoding="utf-8")
    line = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return line.rstrip(".")


def box_table() -> str:
    """Each box, its purpose, and the boxes that it may import."""
    layers = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))
    rows = []
    for box, known in layers["MAY_KNOW"].items():
        foundation = box in layers["FOUNDATION"]
        others = (
            "foundation: every box may import it"
            if foundation
            else ", ".join(f"`{each}`" for each in sorted(known))
        )
        rows.append([f"`{box}`", holds(box), others])
    return table(("box", "holds", "may import"), rows)


def refresh(page: str) -> str:
    """The page with the table as it is now."""
    return SECTION.sub(lambda found: f"{found[1]}\n{box_table()}\n\n{found[2]}", page)
