"""Language models on this machine: fetched, loaded, and chosen to fit the hardware."""

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
