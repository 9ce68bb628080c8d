"""The base of every settings model: unknown keys are refused, values never change, fields document themselves.

A box declares its settings once, in its own `settings.py`, and its components take these models directly.
`rollwright.config` composes them into the configuration of a run and adds nothing to them. A `settings.py` imports
pydantic, this module, `rollwright.registry`, plain data of its own box and other boxes' `settings.py`; nothing heavy.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt

from rollwright.addresses import has_password
from rollwright.registry import Registry

OWN = "own"
"""The kind of a section whose implementation is the user's, or an installed package's."""


class Settings(BaseModel):
    """A frozen section of the configuration. A docstring under a field is its line in `docs/configuration.md`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        # A model's validator is built when it is first used, as a part of the one that holds it.
        defer_build=True,
    )


Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole."""

Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]
"""`auto`: the first of CUDA, MPS and the CPU that exists. The variable `CPU_ONLY` wins over it."""

Threads = PositiveInt | Literal["auto"]
"""`auto`: the cores that this process may use, divided by its workers."""


def _hold_no_secret(url: str) -> str:
    """A configuration is written into run folders and stores, and shown."""
    if has_password(url):
        raise ValueError(
            "holds a password or a key; leave it out, and name the variable that has it in api_key_env"
        )
    return url


EngineUrl = Annotated[str, AfterValidator(_hold_no_secret)]
"""The address of an engine, without any secret."""


def choose_kind(value: Any, registry: Registry[Any], key: str) -> Any:
    """Rewrites a section whose `kind` is `module:name` or an entry point as one of kind `own` with that name in `key`.

    A name alone stands for a section with every default. A kind that nobody knows is refused with the nearest name.
    """
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return value
    kind = value["kind"]
    if kind == OWN or registry.is_built_in(kind):
        return value
    if not registry.knows(kind):
        raise ValueError(f"kind: {registry.unknown(kind)}")
    return {**value, "kind": OWN, key: kind}


def choose_kinds(values: Any, registry: Registry[Any], key: str) -> Any:
    """`choose_kind` for each section of a list."""
    if not isinstance(values, list):
        return values
    chosen = []
    for place, value in enumerate(values):
        try:
            chosen.append(choose_kind(value, registry, key))
        except ValueError as error:
            raise ValueError(f"{place}.{error}") from None
    return chosen
