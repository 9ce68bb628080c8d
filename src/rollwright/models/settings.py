"""Settings of the pools that a model is picked from to fit the machine, and of downloads."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from rollwright.settings import Settings

ModelPool = Annotated[list[str], Field(min_length=1)]

AUTO_MODEL = "auto"
"""Instead of a model's name: the large pool where it fits, else the small one."""

LARGE_POOL, SMALL_POOL = "default_large_model_pool", "default_small_model_pool"
"""Instead of a model's name: one of this pool alone."""


def large_model_pool() -> list[str]:
    return ["nvidia/AceInstruct-1.5B", "dnotitia/Smoothie-Qwen3-1.7B", "Gensyn/Qwen2.5-1.5B-Instruct"]


def small_model_pool() -> list[str]:
    return ["Gensyn/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "smollm2"]


class DownloadConfig(Settings):
    """How patient the download of a model is."""

    timeout: PositiveFloat = 120.0
    """Seconds without a byte after which a connection is made anew. The variable `HF_HUB_DOWNLOAD_TIMEOUT` comes
    first."""
    total_timeout: PositiveFloat = 7200.0
    """Seconds for a whole model."""
    retries: NonNegativeInt = 5
    """Tries in a row that may bring nothing."""
    offline: bool = False
    """Whether to make no request; the variable `HF_HUB_OFFLINE` does the same."""
