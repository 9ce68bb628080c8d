"""What a call's draws are keyed by, and two draws for the price of one digest."""

from hashlib import blake2b
from typing import NamedTuple

from rollwright.draws import KeyPart, digest
from rollwright.policies.base import Prompt, Sampling
from rollwright.trajectory.tokens import pack

_HALF = 1 << 32
"""Half of a 64-bit digest: fine enough for a share, and for picking among far fewer things."""


class Luck(NamedTuple):
    """Two independent draws."""

    share: float
    """In [0, 1)."""
    pick: int
    """Of 32 bits; modulo the number of things, it picks one."""


def luck(*key: KeyPart) -> Luck:
    upper, lower = divmod(digest(*key), _HALF)
    return Luck(upper / _HALF, lower)


def draw_key(prompt: Prompt, sampling: Sampling) -> tuple[KeyPart, ...]:
    """What a sample is keyed by: the call, or at temperature 0 only what the prompt says."""
    if sampling.temperature > 0:
        return prompt.key
    if prompt.ids is not None:
        return ("greedy", blake2b(pack(prompt.ids), digest_size=16).hexdigest())
    return ("greedy", *(part for message in prompt.messages for part in (message.role, message.content)))
