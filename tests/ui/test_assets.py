"""The built front end is the one that its sources give, and needs nothing from elsewhere."""

import json
import re
from hashlib import sha256
from pathlib import Path

from rollwright.ui.app import ASSETS

ROOT = Path(__file__).parents[2]
SOURCES, BUILT = ROOT / "ui", ROOT / "src" / "rollwright" / "ui" / "static"


def digest(folder: Path) -> str:
    """As `ui/digest.js` computes it."""
    found = [
        (str(file.relative_to(folder).as_posix()), file.read_bytes())
        for file in folder.rglob("*")
        if file.is_file()
        and not any(part == "node_modules" or part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    total = sha256()
    for name, content in sorted(found):
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def test_the_built_assets_are_those_of_the_sources() -> None:
    built = json.loads((BUILT / "sources.json").read_text())["sha256"]
    assert built == digest(SOURCES), "the sources in ui/ have changed: run `make ui` and commit the result"


def test_every_asset_is_there_and_asks_nothing_of_other_machines() -> None:
    for name in ASSETS:
        content = (BUILT / name).read_text(encoding="utf-8")
        assert content
        outside = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", content))
        assert outside <= {"http://www.w3.org", "//www.w3.org"}, outside  # names of XML namespaces


def test_the_front_end_makes_no_markup_from_text() -> None:
    for file in (SOURCES / "src").rglob("*.ts*"):
        content = file.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySet|document\.write|eval\(", content
        ), file
