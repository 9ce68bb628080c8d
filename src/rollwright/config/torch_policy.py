"""A model in this process as the policy."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from rollwright.config.base import Settings


class TorchPolicyConfig(Settings):
    """A transformers model in this process: for small models, on a CPU or one GPU."""

    kind: Literal["torch"]
    """Chooses this policy."""
    model: str
    """A folder as transformers saves a model, the name of a fetched one (`smollm2`), or `owner/name` on a hub."""
    renderer: str = "auto"
    """What turns chats into ids: a family of the `renderers` package, `template` (the model's own), or `auto`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What it computes in. A trainer's log-probabilities agree to 1e-4 with those of `float32` alone."""
    device: str = "cpu"
    """As torch names it: `cpu`, `cuda`, `cuda:1`."""
    threads: PositiveInt = 1
    """Of torch, in the whole process; `OMP_NUM_THREADS` comes first. More than 1 only if nothing else runs."""
    max_batch: PositiveInt = 256
    """Calls that are served at the same time; more wait in line."""
    batch_invariant: bool = False
    """Whether a call's result is the same to the bit whoever else is in the batch. Several times slower."""
    prefix_cache_mb: Annotated[int, Field(ge=0)] = 512
    """Megabytes of keys and values kept for the next turns of episodes."""
