"""Settings of where, and with how much of the machine, a model computes."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]
"""`auto`: the first of CUDA, MPS and the CPU that is there. The variable `CPU_ONLY` wins over it."""

Threads = PositiveInt | Literal["auto"]
"""`auto`: as many as this process may use of the machine, shared out over its workers."""
