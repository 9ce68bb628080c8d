"""Plain data: the distribution that a turn's tokens were drawn from, and whether a trainer can compute it again.

Always true: what only says where a completion ends (token limit, stop texts) changes no token's probability and is not
in it; the seed is not either, because it follows from the call's key.
"""

import math

import msgspec

MIN_TEMPERATURE = 0.01
"""Below it engines sample something else than they were told: vLLM rounds up to it or takes the likeliest token, and
float32 logits divided by less overflow."""


class SamplingParams(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """As the engine was told them, under vLLM's names. The defaults are the model's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Likeliest tokens that were sampled from; 0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    other: tuple[str, ...] = ()
    """Further fields of the request that may change the distribution, such as `logit_bias`."""

    @property
    def not_modelled(self) -> str | None:
        """Why the probability of a token is not that of the model's logits over a temperature, which is what trainers
        compute; `None`: it is."""
        if not MIN_TEMPERATURE <= self.temperature < math.inf:
            return f"sampled at temperature {self.temperature:g}"
        if others := self.beside_temperature():
            return f"sampled with {others[0]}"
        return None

    def beside_temperature(self) -> list[str]:
        """What else shapes the distribution, as `name value`."""
        return [
            f"{name} {getattr(self, name):g}"
            for name in _NUMBERS
            if getattr(self, name) != getattr(_PLAIN, name)
        ] + list(self.other)

    def described(self) -> str:
        """For people: the temperature, and whatever else is not neutral."""
        return ", ".join([f"temperature {self.temperature:g}", *self.beside_temperature()])


_NUMBERS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_PLAIN = SamplingParams()
