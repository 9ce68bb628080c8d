"""Language models on this machine: what can be fetched, where it lies, and how it is loaded."""

from rollwright.models.cache import model_folder
from rollwright.models.catalogue import CATALOGUE, ModelSource
from rollwright.models.checksum import weights_checksum
from rollwright.models.fetching import Progress, fetch
from rollwright.models.loading import load_model, load_tokenizer

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
