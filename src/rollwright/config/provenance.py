"""Origin of each value of a configuration: default, file and line, environment variable, or command line."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollwright.config.env_vars import environment_settings
from rollwright.config.loading import load, read_content
from rollwright.config.migrations import KEY, migrated
from rollwright.config.run import RunConfig

DEFAULT = "default"


@dataclass(frozen=True)
class Value:
    """Effective value of one setting, and its origin."""

    key: str
    """Dotted path."""
    value: Any
    origin: str


def origins(file: Path, overrides: Sequence[str] = ()) -> list[Value]:
    """All settings of a file with their origins, in the order of the models."""
    config = load(file, overrides)
    content = read_content(file)
    lines = _lines(file.read_text(encoding="utf-8"))
    told = {key: f"{file}:{line}" for key, line in lines.items() if key != KEY}
    told |= {key: str(file) for key in _renamed(content, file) if key not in told}
    told |= {each.key: f"environment: {each.variable}" for each in environment_settings(content)}
    told |= {each.partition("=")[0]: "command line" for each in overrides}
    return [Value(key, value, _origin(key, told)) for key, value in flat(config.model_dump(mode="json"))]


def defaults() -> dict[str, Any]:
    return dict(flat(RunConfig().model_dump(mode="json")))


def flat(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves with their dotted paths; an empty section is a leaf."""
    for key, value in content.items():
        place = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, place)
        else:
            yield place, value


def _origin(key: str, told: Mapping[str, str]) -> str:
    """Origin of the setting itself, or of a section that was given as a whole."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if (found := told.get(".".join(parts[:length]))) is not None:
            return (
                found if length == len(parts) or not _is_section(".".join(parts[:length]), told) else DEFAULT
            )
    return DEFAULT


def _is_section(key: str, told: Mapping[str, str]) -> bool:
    return any(other.startswith(f"{key}.") for other in told)


def _renamed(content: Mapping[str, Any], file: Path) -> list[str]:
    """Keys of the content after its migrations."""
    return [key for key, _ in flat(migrated(content, str(file)))]


def _lines(text: str) -> dict[str, int]:
    """Line number of each key, from 1."""
    found: dict[str, int] = {}

    def visit(node: yaml.Node, path: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = str(getattr(key, "value", ""))
            if name == "<<":
                visit(value, path)
                continue
            place = f"{path}.{name}" if path else name
            found[place] = key.start_mark.line + 1
            visit(value, place)

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is not None:
        visit(node, "")
    return found
