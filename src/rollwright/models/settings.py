"""Settings of the model pools and of downloads."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from rollwright.settings import Settings

ModelPool = Annotated[list[str], Field(min_length=1)]

AUTO_MODEL = "auto"
"""Model name for a choice: from the large pool if one of its models fits, else from the small one."""

LARGE_POOL, SMALL_POOL = "default_large_model_pool", "default_small_model_pool"
"""Model names for a choice from one pool."""


def large_model_pool() -> list[str]:
    return ["nvidia/AceInstruct-1.5B", "dnotitia/Smoothie-Qwen3-1.7B", "Gensyn/Qwen2.5-1.5B-Instruct"]


def small_model_pool() -> list[str]:
    return ["Gensyn/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "smollm2"]


class DownloadConfig(Settings):
    """Timeouts and retries of model downloads."""

    timeout: PositiveFloat = 120.0
    """Seconds without a byte after which the connection is opened again. The variable `HF_HUB_DOWNLOAD_TIMEOUT` takes
    precedence."""
    total_timeout: PositiveFloat = 7200.0
    """Seconds for a whole model."""
    retries: NonNegativeInt = 5
    """Consecutive tries without progress before the download fails."""
    offline: bool = False
    """Make no request; the variable `HF_HUB_OFFLINE` does the same."""
