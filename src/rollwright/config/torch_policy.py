"""A model in this process as the policy."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from rollwright.hardware.settings import Device, Threads
from rollwright.settings import Settings


class TorchPolicyConfig(Settings):
    """A transformers model in this process: for small models, on a CPU or one GPU."""

    kind: Literal["torch"]
    """Chooses this policy."""
    model: str
    """A folder as transformers saves a model, the name of a fetched one (`smollm2`), `owner/name` on a hub; `auto`: one
    that fits, from the pools; `default_large_model_pool`, `default_small_model_pool`: from that one."""
    renderer: str = "auto"
    """What turns chats into ids: a family of the `renderers` package, `template` (the model's own), or `auto`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What it computes in. A trainer's log-probabilities agree to 1e-4 with those of `float32` alone."""
    device: Device = "auto"
    """`cpu`, `mps`, `cuda`, `cuda:1` …, or `auto`: the best that is there. The variable `CPU_ONLY` comes first."""
    threads: Threads = "auto"
    """Of torch, in the whole process; `OMP_NUM_THREADS` and `MKL_NUM_THREADS` come first. `auto`: the cores that this
    process may use, shared out over its workers."""
    max_batch: PositiveInt = 256
    """Most calls that are served at the same time; more wait in line."""
    cache_mb: PositiveInt | None = None
    """Megabytes for keys and values of the calls that are being served; calls that do not fit wait in line. Unset: what is
    free beside the weights and the training."""
    batch_invariant: bool = False
    """Whether a call's result is the same to the bit whoever else is in the batch. Several times slower."""
    prefix_cache_mb: Annotated[int, Field(ge=0)] = 512
    """Megabytes of keys and values kept for the next turns of episodes."""
