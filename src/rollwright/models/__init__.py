"""Language models on this machine: fetched, loaded, and chosen to fit the hardware."""

from typing import TYPE_CHECKING

from rollwright.lazy import lazy_names

if TYPE_CHECKING:
    from rollwright.models.catalogue import CATALOGUE, ModelSource, Progress, model_folder
    from rollwright.models.fetching import fetch
    from rollwright.models.loading import load_model, load_tokenizer, weights_checksum

__all__ = [
    "CATALOGUE",
    "ModelSource",
    "Progress",
    "fetch",
    "load_model",
    "load_tokenizer",
    "model_folder",
    "weights_checksum",
]

__getattr__ = lazy_names(
    __name__,
    {
        "CATALOGUE": "catalogue",
        "ModelSource": "catalogue",
        "Progress": "catalogue",
        "fetch": "fetching",
        "load_model": "loading",
        "load_tokenizer": "loading",
        "model_folder": "catalogue",
        "weights_checksum": "loading",
    },
)
