"""What a user's further request fields (`extra_body`) do to the distribution that is sampled from. Pure.

Always true: a field that may change the distribution is recorded with the turn, under its own name where it is known;
a field that nobody knows counts as one that may. So no setting can shape what is trained behind the trainer's back.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rollwright.errors import ConfigError
from rollwright.policies.base import Sampling
from rollwright.trajectory import SamplingParams

_NUMBERS = frozenset(SamplingParams.__struct_fields__) - {"other"}

_HARMLESS = frozenset(
    {
        "add_special_tokens",
        "cache_salt",
        "include_stop_str_in_output",
        "metadata",
        "parallel_tool_calls",
        "priority",
        "request_id",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "store",
        "user",
    }
)
"""Fields that change who is served when, what comes back, or where a completion ends: no token's probability."""


def shaping(extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that these request fields set; raises a `ConfigError` for a value of a wrong kind."""
    found = {name: extra_body[name] for name in sorted(extra_body.keys() & _NUMBERS)}
    if isinstance(found.get("top_k"), int):
        found["top_k"] = max(found["top_k"], 0)  # vLLM and SGLang say -1 for all
    try:
        msgspec.convert(found, SamplingParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"extra_body: {error}") from None
    if others := sorted(extra_body.keys() - _NUMBERS - _HARMLESS):
        found["other"] = tuple(others)
    return found


def sent(sampling: Sampling, shaped: Mapping[str, Any]) -> SamplingParams | None:
    """What an engine is told where `shaping` found something; `None`: what was asked for."""
    if not shaped:
        return None
    return msgspec.structs.replace(sampling.params(), **shaped)
