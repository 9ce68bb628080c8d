"""The base of every settings model: unknown keys are refused, values never change, fields document themselves.

A box declares its settings once, in its own `settings.py`, and its components take these models directly.
`rollwright.config` composes them into the configuration of a run and adds nothing to them. A `settings.py` imports
pydantic, this module, `rollwright.registry`, plain data of its own box and `settings.py` of other boxes, and nothing heavy.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt

from rollwright.addresses import has_password
from rollwright.registry import Registry

OWN = "own"
"""The kind of a section whose implementation belongs to the user or an installed package."""


class Settings(BaseModel):
    """A frozen section of the configuration. A docstring under a field is its line in `docs/configuration.md`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        # Validators are built at first use, as part of the enclosing model's: building each at import is slow.
        defer_build=True,
    )


Share = Annotated[float, Field(ge=0, le=1)]
"""A fraction from 0 to 1."""

Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]
"""`auto`: the first of CUDA, MPS and the CPU that exists. The variable `CPU_ONLY` wins over it."""

Threads = PositiveInt | Literal["auto"]
"""`auto`: the cores that this process may use, divided by its workers."""


def _refuse_secret(url: str) -> str:
    """Refuse a URL with a secret: configurations are written into run folders and stores, and displayed."""
    if has_password(url):
        raise ValueError(
            "holds a password or a key; remove it and name the variable that holds it in api_key_env"
        )
    return url


EngineUrl = Annotated[str, AfterValidator(_refuse_secret)]
"""The address of an engine, without any secret."""


def choose_kind(value: Any, registry: Registry[Any], key: str, own: str = OWN) -> Any:
    """Rewrite a section whose `kind` is `module:name` or an entry point as one of kind `own` with that name in `key`.

    A string is short for a section with all defaults. An unknown kind is refused with the nearest name.
    """
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return value
    kind = value["kind"]
    if kind == own or registry.is_built_in(kind):
        return value
    if not registry.knows(kind):
        raise ValueError(f"kind: {registry.unknown(kind)}")
    return {**value, "kind": own, key: kind}


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
