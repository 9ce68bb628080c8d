"""Loads a `RunConfig` from YAML and dotted overrides.

A user's mistake becomes one line: file, key, error, accepted values. For a misspelt key, the line suggests the nearest one.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollwright.config.env_vars import EnvironmentSetting, environment_settings
from rollwright.config.migrations import CURRENT, KEY, migrated
from rollwright.config.run import RunConfig
from rollwright.engines.settings import PolicyConfig, SimulatedPolicyConfig
from rollwright.errors import ConfigError


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a YAML file; later values win: defaults, file, environment variables, then each `key.path=value` in order."""
    file = Path(path)
    content = read_content(file)
    content.setdefault("name", _name_from(file))
    variables = environment_settings(content)
    above = [each.override for each in variables]
    try:
        return _placed(build(content, [*above, *overrides], source=str(file)), file)
    except ConfigError as error:
        raise _attribute(error, file, variables, lambda left: build(content, [*left, *overrides])) from error


def _placed(config: RunConfig, file: Path) -> RunConfig:
    """The configuration with the folder that its task files and modules are in, where it names any; a script's path is
    relative to the file."""
    here = file.resolve().parent
    placed: dict[str, Any] = {}
    if config.folder is None and any(each.names_files for each in config.custom_envs.values()):
        placed["folder"] = str(here)
    if (own := _with_script(config.policy, here)) is not config.policy:
        placed["policy"] = own
    others = {name: _with_script(each, here) for name, each in config.policies.items()}
    if any(others[name] is not each for name, each in config.policies.items()):
        placed["policies"] = others
    return config.model_copy(update=placed) if placed else config


def _with_script(policy: PolicyConfig, folder: Path) -> PolicyConfig:
    if not isinstance(policy, SimulatedPolicyConfig) or not isinstance(policy.script, str):
        return policy
    path = folder / Path(policy.script).expanduser()
    return policy if str(path) == policy.script else policy.model_copy(update={"script": str(path)})


def _attribute(
    error: ConfigError,
    file: Path,
    variables: Sequence[EnvironmentSetting],
    build_with: Callable[[Sequence[str]], object],
) -> ConfigError:
    """The error, attributed to environment variables instead of the file if it vanishes without them."""

    def is_valid_without(left_out: Sequence[EnvironmentSetting]) -> bool:
        try:
            build_with([each.override for each in variables if each not in left_out])
        except ConfigError:
            return False
        return True

    for suspects in (*([each] for each in variables), variables):
        if suspects and is_valid_without(suspects):
            named = " and ".join(f"{each.variable}={each.value}" for each in suspects)
            return ConfigError(f"environment variable {named}: {str(error).replace(f'{file}: ', '')}")
    return error


def read_content(file: Path) -> dict[str, Any]:
    """Content of a YAML file, unchecked."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: is not valid YAML: {_one_line(str(error))}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: holds a {type(content).__name__}; expected keys and values")
    return content


def build(content: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> RunConfig:
    """Build the configuration from plain data and overrides."""
    for override in overrides:
        key, found, _ = override.partition("=")
        if not found or not key:
            raise ConfigError(f"override `{override}`: expected key.path=value, for example seed=7")
    try:
        below = OmegaConf.create(migrated(content, source))
        above = OmegaConf.from_dotlist(list(overrides))
        merged = OmegaConf.merge(_without_other_kinds(below, above), above)
        plain = OmegaConf.to_container(merged, resolve=True)
    except GrammarParseError as error:  # its message quotes the value, which may be a secret
        where = f"`{error.full_key}`" if error.full_key else "a value"
        raise ConfigError(
            f"{source}: {where} holds a ${{…}} that cannot be read; accepted: ${{key.path}}, or \\${{ for the characters"
        ) from None
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {_one_line(str(error))}") from error
    try:
        return RunConfig.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(_explain_all(error.errors()))}") from error


def _without_other_kinds(below: DictConfig, above: DictConfig) -> DictConfig:
    """Drop the settings of sections whose `kind` is overridden, because they belong to the old kind."""
    for key, block in above.items():
        if isinstance(block, DictConfig) and isinstance(below.get(key), DictConfig):
            if "kind" in block and block.kind != below[key].get("kind"):
                below[key] = {}
            else:
                _without_other_kinds(below[key], block)
    return below


def dump(config: RunConfig) -> str:
    """The configuration as YAML, with every default."""
    content = {KEY: CURRENT, **config.model_dump(mode="json")}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _name_from(file: Path) -> str:
    # A backup `run.yaml.TIME.bak` has the name of its run.
    stem = re.split(r"\.ya?ml\b", file.name)[0] if file.suffix == ".bak" else file.stem
    kept = "".join(each if each.isalnum() or each in "._-" else "-" for each in stem)
    return kept.lstrip("._-") or "run"


def _explain_all(errors: Sequence[ErrorDetails]) -> list[str]:
    """One line for each mistake: a value that no member of a union accepts has an error for each of them."""
    accepted: dict[str, list[str]] = {}
    for error in errors:
        mistake, found, expected = _explain(error).partition("; expected ")
        accepted.setdefault(mistake, []).extend([expected] if found else [])
    return [
        f"{mistake}; expected {' or '.join(dict.fromkeys(each))}" if each else mistake
        for mistake, each in accepted.items()
    ]


def _explain(error: ErrorDetails) -> str:
    place, known = _place_of([str(part) for part in error["loc"]])
    key = ".".join(place)
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_hint(place[-1], known)}"
    if error["type"] == "missing":
        return f"{key}: is needed and has no default"
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        # The message of a section's validator starts with its key; the message of a single value does not.
        below = re.match(r"[\w.]+: ", message) is not None
        return f"{key}{'.' if below else ': '}{message}" if key else message
    if error["type"].startswith("union_tag"):
        return f"{key}.kind: {_one_line(error['msg'])}"
    value = "null" if error["input"] is None else repr(error["input"])
    value = value if len(value) <= _SHOWN_VALUE else f"{value[:_SHOWN_VALUE]} …"
    expected = _EXPECTED.get(error["type"])
    return f"{key}: got {value}; {expected.format(**error.get('ctx', {})) if expected else _one_line(error['msg'])}"


_SHOWN_VALUE = 100
"""Characters of a wrong value that its line quotes: a whole section may stand where a number is expected."""

_UNION_MEMBER = re.compile(
    r"int|float|str|bool|(constrained|lax-or-strict|nullable|function)-.*|(literal|list|dict|tuple)\[.*"
)
"""Part of an error's location by which pydantic names the member of a union that it has tried."""

_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "expected a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "expected a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "expected keys and values"),
    "string_type": "expected text",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected {ge:g} or more",
    "less_than": "expected less than {lt:g}",
    "less_than_equal": "expected {le:g} or less",
    "finite_number": "expected a finite number",
    "literal_error": "expected {expected}",
    "enum": "expected {expected}",
}
"""What is accepted, by the type of pydantic's error, in the words of `docs/configuration.md`."""


def _hint(key: str, known: Sequence[str]) -> str:
    """The nearest of the keys known at this place; else a key of that name at another place; else all known ones."""
    if nearest := get_close_matches(key, known, n=1):
        return f"did you mean `{nearest[0]}`?"
    elsewhere = {path.rsplit(".", 1)[-1]: path for path in reversed(list(_paths(RunConfig)))}
    # A stricter comparison than among the neighbours: there are hundreds of keys.
    if nearest := get_close_matches(key, elsewhere, n=1, cutoff=0.85):
        return f"did you mean `{elsewhere[nearest[0]]}`?"
    return f"known here: {', '.join(sorted(known))}"


def _paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Paths of all keys below a model, in the order of their declaration; keys of lists and of named sections have none."""
    for name, field in model.model_fields.items():
        path = f"{above}{name}"
        yield path
        for choice in _choices(field.annotation):
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                yield from _paths(choice, f"{path}.")


def _place_of(loc: Sequence[str]) -> tuple[list[str], list[str]]:
    """Path of an error in the file, without the kinds by which pydantic tags unions, and the known keys beside its last."""
    place: list[str] = []
    known: list[str] = []
    here: list[Any] = [RunConfig]
    for part in loc:
        choices = [choice for annotation in here for choice in _choices(annotation)]
        models = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
        decided = [model for model in models if len(models) > 1 and part in _kinds_of(model)]
        if decided:
            here = decided
            continue
        if len(choices) > 1 and _UNION_MEMBER.fullmatch(part):
            continue
        place.append(part)
        known = [key for model in models for key in model.model_fields]
        here = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        here += [get_args(choice)[-1] for choice in choices if get_origin(choice) in (dict, list)]
        here += [get_args(choice)[0] for choice in choices if get_origin(choice) is tuple]
    return place, known


def _choices(annotation: Any) -> list[Any]:
    """Members of a union; any other annotation is one choice."""
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [choice for each in get_args(annotation) for choice in _choices(each)]
    return [annotation]


def _kinds_of(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("kind")
    return () if field is None else get_args(field.annotation)


def _one_line(message: str) -> str:
    return " ".join(message.split())
