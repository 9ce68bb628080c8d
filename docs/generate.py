"""Writes the pages that follow from something else: `configuration.md` from the settings models, `plugging_in.md`
from the registries, `benchmarks.md` from the figures in `bench/results`, the line numbers of `architecture.md` from the
functions that its walks name.

    python docs/generate.py

All are pure functions of their sources, so a test can tell whether a page is up to date.
"""

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollwright.config import RunConfig

sys.path.insert(0, str(Path(__file__).resolve().parent))
import agent_reports
import benchmark_reports
import box_table
import learning_reports
import plug_points
import public_api
import scale_reports
import training_reports
import tree_reports
import walk_lines
from markdown_tables import table

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results"

Figures = Mapping[str, Any]
"""What a benchmark has left in its file."""


CONFIGURATION = """# Configuration

A run is described by one YAML file. `rollwright run FILE` reads it; each `key.path=value` behind it wins over the
file, and later ones over earlier ones:

```console
$ rollwright run configs/frozen_lake.yaml seed=7 policy.skill=0.9 train_env_manager.group_size=4
```

An unknown key, a number out of range or an unknown tag is refused in one line that names the key and what is
accepted. The configuration as used, with every default filled in, is in the run folder as `config.yaml`, and loads
again. `${path.to.key}` refers to another key. This page is generated from the models in the `settings.py` of each box, which `src/rollwright/config/run.py` composes.

`train_env_manager`, `val_env_manager` or both are needed; everything else has a default.
"""

PLAIN_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}


def configuration() -> str:
    """The page, one table for each section of the configuration."""
    return "\n".join([CONFIGURATION, *dict.fromkeys(_sections(RunConfig, ""))])  # kinds may share a part


def _sections(model: type[BaseModel], path: str, note: str = "") -> Iterator[str]:
    yield _section(model, path, note)
    for name, field in model.model_fields.items():
        nested = _models(field.annotation)
        below = f"{path}.{name}".lstrip(".")
        for each in nested:
            kind = f" with `kind: {_kind(each)}`" if len(nested) > 1 else ""
            yield from _sections(each, below + (".TAG" if get_origin(field.annotation) is dict else ""), kind)


def _field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The text below each field, of the model's own and of those that it inherits.

    Read here and not by pydantic (`use_attribute_docstrings`): that parses the source at every import of the settings."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if not issubclass(each, BaseModel) or each is BaseModel:
            continue
        (declared,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(declared, ast.ClassDef)
        for field, below in pairwise(declared.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match below:
                    case ast.Expr(ast.Constant(str(text))):
                        found[field.target.id] = inspect.cleandoc(text)
    return found


def _section(model: type[BaseModel], path: str, note: str) -> str:
    lines = [f"## `{path}`{note}" if path else "## The run"]
    if model.__doc__:
        lines += ["", _one_line(model.__doc__)]
    rows = []
    meanings = _field_docstrings(model)
    for name, field in model.model_fields.items():
        key = f"{path}.{name}".lstrip(".")
        nested = _models(field.annotation)
        meaning = _one_line(meanings.get(name, ""))
        if not meaning and nested:
            meaning = _one_line(nested[0].__doc__ or "") if len(nested) == 1 else "Which policy plays."
        kind = "a section, see below" if nested else _type(field.annotation, field.metadata)
        rows.append((f"`{key}`", kind, _default(field), meaning))
    return "\n".join([*lines, "", table(("key", "accepts", "default", "meaning"), rows), ""])


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The settings models behind a field, where there are some."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _kind(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["kind"].annotation)[0])


def _type(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """An annotation in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], [*parts[1:], *limits])
    if origin in (Union, UnionType):
        return " or ".join(_type(part, limits) for part in parts if part is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if origin in (list, tuple):
        return f"list of: {_type(parts[0])}"
    if origin is dict:
        return "keys and values"
    words = [PLAIN_TYPES[annotation], *(_limit(each) for each in limits)]
    return ", ".join(word for word in words if word)


def _limit(limit: Any) -> str:
    match limit:
        case FieldInfo():
            return ", ".join(_limit(each) for each in limit.metadata)
        case annotated_types.Gt():
            return f"above {limit.gt}"
        case annotated_types.Ge():
            return f"{limit.ge} or more"
        case annotated_types.Lt():
            return f"below {limit.lt}"
        case annotated_types.Le():
            return f"{limit.le} or less"
        case _:
            pattern = getattr(limit, "pattern", None)
            return f"as `{pattern}`" if pattern else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return f"`kind: {_kind(type(value))}`" if "kind" in type(value).model_fields else ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _one_line(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split())


BENCHMARKS = """# Benchmarks

Each benchmark is one program under `bench/`. It prints a table and writes its figures to `bench/results`; this page
is generated from those files by `make docs`. A promise that is not kept says so.
"""


REPORTS = {
    **benchmark_reports.REPORTS,
    **tree_reports.REPORTS,
    **agent_reports.REPORTS,
    **training_reports.REPORTS,
    **scale_reports.REPORTS,
    **learning_reports.REPORTS,
}


def benchmarks(results: Path = RESULTS) -> str:
    """The page, from whatever figures there are."""
    parts = [BENCHMARKS]
    for name, (text, report) in REPORTS.items():
        parts += [f"## {name}", "", text, "", f"`python bench/{name}.py`", ""]
        file = results / f"{name}.json"
        if file.is_file():
            figures = json.loads(file.read_text(encoding="utf-8"))
            parts += [_machine(figures), "", *report(figures), ""]
        else:
            parts += ["There are no figures yet.", ""]
    return "\n".join(parts)


def _machine(figures: Figures) -> str:
    cores, load = figures.get("cores"), figures.get("load_before")
    known = [
        figures.get("date"),
        f"{cores} core{'s' if cores > 1 else ''}" if cores else None,
        f"Python {figures['python']}" if "python" in figures else None,
        f"load {load:.1f} before it began" if load else None,
    ]
    return f"Measured: {', '.join(each for each in known if each)}."


def architecture() -> str:
    """The page as it is, with its walks' line numbers and its table of boxes as they are now."""
    return box_table.refresh(walk_lines.refresh((DOCS / "architecture.md").read_text(encoding="utf-8")))


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "api.md": public_api.page,
    "plugging_in.md": plug_points.plugging_in,
    "benchmarks.md": benchmarks,
    "architecture.md": architecture,
}
"""Every generated page, and what it says now."""


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
