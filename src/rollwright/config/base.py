"""What every settings model shares: unknown keys are refused, values do not change, fields document themselves."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from rollwright.addresses import has_password


class Settings(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        # A model's validator is built when it is first used, as a part of the one that holds it.
        defer_build=True,
    )


def _hold_no_secret(url: str) -> str:
    """A configuration is written into run folders and stores, and shown."""
    if has_password(url):
        raise ValueError(
            "holds a password or a key; leave it out, and name the variable that has it in api_key_env"
        )
    return url


EngineUrl = Annotated[str, AfterValidator(_hold_no_secret)]
"""An address of an engine, without any secret."""
