"""Settings of the gateway."""

import re
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import field_validator, model_validator

from rollwright.settings import Settings

ClientSampling = Literal["pinned", "honoured"]
"""Treatment of a client's sampling parameters."""

ClientFormats = Literal["enforced", "ignored"]
"""Treatment of a client's forced tool choice and output format."""


class CallRule(Settings):
    """A rule for some of an agent's calls: whether they are trained, and which policy answers. A call matches if everything
    that the rule names matches."""

    model: str | None = None
    """Name of the model that the client sends, with `*` and `?` as wildcards."""
    agent: str | None = None
    """Agent by the header `x-rollwright-agent`, with wildcards; without the header it is `agent`."""
    system: str | None = None
    """Regular expression that is found in the system prompt."""
    train: bool = False
    """Whether the calls are trained. Calls that match no rule are."""
    policy: str | None = None
    """Name of a policy in `policies` that answers. Unset: the run's own."""

    @field_validator("system")
    @classmethod
    def _is_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _fits(self) -> "CallRule":
        if self.model is None and self.agent is None and self.system is None:
            raise ValueError("names no call; accepted: one or more of model, agent, system")
        if self.policy is not None and self.train:
            raise ValueError(
                "train: the run trains its own policy alone; accepted with `policy`: train: false"
            )
        return self

    def matches(self, model: str, agent: str, system: str) -> bool:
        return (
            (self.model is None or fnmatchcase(model, self.model))
            and (self.agent is None or fnmatchcase(agent, self.agent))
            and (self.system is None or re.search(self.system, system) is not None)
        )


class CaptureRules(Settings):
    """Rules for agents whose calls are recorded by the gateway."""

    client_sampling: ClientSampling = "pinned"
    """Treatment of a client's temperature, top_p and other sampling parameters. `pinned`: every call uses `sampling`;
    deviating requests are counted. `honoured`: a call's temperature and top_p apply; tokens sampled at temperature 0 or
    with a top_p below 1 are then masked out of the loss."""
    client_formats: ClientFormats = "enforced"
    """Treatment of a forced tool choice and of JSON output formats. `enforced`: by constrained decoding; such turns are masked
    out of the loss, because their log-probabilities are those of the allowed tokens alone. `ignored`: the model answers
    freely and is trained; such requests are counted."""
    allow_no_calls: bool = False
    """Whether a rollout whose agent made no call may end with a reward; else it is a failure."""
    calls: tuple[CallRule, ...] = ()
    """Which calls are trained, and which policy answers them; the first rule that matches applies."""
    strip: tuple[str, ...] = ()
    """Regular expressions of what is taken out of system prompts before the model sees them: parts that change from call to
    call and mean nothing to it, for which every call would begin a new token sequence."""

    @field_validator("strip")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                re.compile(each)
            except re.error as error:
                raise ValueError(f"{each!r} is not a regular expression: {error}") from error
        return value

    def rule_for(self, model: str, agent: str, system: str) -> CallRule | None:
        """The first rule that matches a call; `None`: it is trained and answered by the run's own policy."""
        return next((each for each in self.calls if each.matches(model, agent, system)), None)
