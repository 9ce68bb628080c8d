"""Derives a tool's JSON schema from a function's signature and docstring, and validates arguments against it.

Parameters may have any annotation that pydantic supports, also under `from __future__ import annotations`. The toolbox
fills in a parameter of type `ToolContext`; it is not part of the schema. Parameter descriptions come from
`Annotated[..., Field(description=...)]`, else from an `Args:` section (Google style) or from `:param name:` lines.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from rollwright.errors import ConfigError, RollwrightError
from rollwright.tools.context import ToolContext

_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*$"
)
_GOOGLE = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SPHINX = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")

_NAMELESS = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
)


class BadArguments(RollwrightError):
    """A model's arguments do not match the tool's schema."""


class Signature(msgspec.Struct, frozen=True):
    """Parsed signature of a tool function."""

    description: str
    arguments: type[BaseModel]
    """Model whose fields have the parameters' names as aliases, because a parameter's name may clash with an attribute of
    pydantic models."""
    context: str | None
    """Name of the `ToolContext` parameter; `None`: there is none."""

    def json_schema(self) -> dict[str, Any]:
        """JSON schema of the arguments, without pydantic's titles."""
        schema = self.arguments.model_json_schema(by_alias=True)
        schema.pop("title", None)
        for each in schema.setdefault("properties", {}).values():
            each.pop("title", None)
        return schema

    def read(self, text: str) -> dict[str, Any]:
        """Parses a model's JSON into arguments of the declared types; omitted arguments stay omitted."""
        try:
            given = self.arguments.model_validate_json(text or "{}")
        except ValidationError as error:
            raise BadArguments(_describe_errors(error)) from None
        fields = type(given).model_fields
        return {str(fields[each].alias): getattr(given, each) for each in given.model_fields_set}


def read_signature(function: Callable[..., Any], name: str) -> Signature:
    """Parses a function's signature; raises a `ConfigError` that names an unsupported parameter."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"tool {name}: {error}; an annotation may use names of its module") from error
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise ConfigError(f"tool {name}: {error}; wrap it in a function of your own") from error
    description, described = read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    context: str | None = None
    for parameter in parameters:
        if hints.get(parameter.name) is ToolContext:
            context = parameter.name
        elif parameter.kind in _NAMELESS:
            raise ConfigError(
                f"tool {name}: {parameter} cannot be passed by keyword; every parameter of a tool must be"
            )
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            hint = hints.get(parameter.name, Any)
            own = [each.description for each in get_args(hint) if isinstance(each, FieldInfo)]
            about = next((each for each in own if each), described.get(parameter.name))
            fields[f"p{len(fields)}"] = (hint, Field(default, alias=parameter.name, description=about))
    return Signature(description, _model(name, fields), context)


def _model(name: str, fields: dict[str, Any]) -> type[BaseModel]:
    try:
        model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except PydanticUserError as error:
        line = str(error).splitlines()[0]
        raise ConfigError(f"tool {name}: {line}; use annotations that JSON can represent") from error
    return model


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Text before the first section, and the description of each parameter."""
    summary: list[str] = []
    about: dict[str, list[str]] = {}
    section, indent, current = "", None, None
    for line in text.splitlines():
        if found := _SPHINX.match(line):
            section, current = "sphinx", found[1]
            about[current] = [found[2]]
        elif found := _SECTION.match(line):
            section, indent, current = found[1], None, None
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            found = _GOOGLE.match(line)
            if found and (indent is None or len(found[1]) == indent):
                indent, current = len(found[1]), found[2]
                about[current] = [found[3]]
            elif current is not None and line.strip():
                about[current].append(line.strip())
        elif section == "sphinx" and current is not None and line.strip() and not line.startswith(":"):
            about[current].append(line.strip())
        elif line.startswith(":"):
            current = None
    described = {name: " ".join(part for part in parts if part) for name, parts in about.items()}
    return "\n".join(summary).strip(), {name: said for name, said in described.items() if said}


def _describe_errors(error: ValidationError) -> str:
    """One line with each invalid argument and the reason."""
    parts = []
    for each in error.errors(include_url=False):
        place = ".".join(map(str, each["loc"]))
        given = "" if each["type"] == "missing" else f" (got {each['input']!r:.80})"
        parts.append(f"{place}: {each['msg']}{given}" if place else f"{each['msg']}{given}")
    return "; ".join(parts)
