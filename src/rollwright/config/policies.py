"""Which policy plays, one model for each kind; `kind` chooses."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rollwright.config.base import EngineUrl, Settings
from rollwright.config.engines import LlamaCppPolicyConfig, SglangPolicyConfig, VllmPolicyConfig
from rollwright.config.torch_policy import TorchPolicyConfig

Share = Annotated[float, Field(ge=0, le=1)]


class RandomPolicyConfig(Settings):
    """Plays any existing action, each as likely."""

    kind: Literal["random"]
    """Chooses this policy."""


class OraclePolicyConfig(Settings):
    """Plays the next action of a shortest solution."""

    kind: Literal["oracle"]
    """Chooses this policy."""


class SimulatedPolicyConfig(Settings):
    """An engine with slots and a latency model, and a player of known skill in place of a model."""

    kind: Literal["simulated"] = "simulated"
    """Chooses this policy."""
    slots: PositiveInt = 64
    """Calls that are served at the same time; more wait in line."""
    tokens_per_second: PositiveFloat = 100.0
    """Speed of one slot."""
    mean_tokens: PositiveFloat = 40.0
    """Mean length of a completion."""
    spread: NonNegativeFloat = 0.6
    """Sigma of the lognormal length distribution: 0 gives equal lengths, 1 and more a heavy tail."""
    skill: Share = 0.7
    """How often it plays the oracle's action instead of a random one."""
    failure_rate: Share = 0.0
    """Share of calls that fail."""
    hang_rate: Share = 0.0
    """Share of calls that never answer."""
    max_queue: PositiveInt | None = None
    """Calls that may wait in line; more are refused as rate-limited. Unset: no limit."""


class OpenAIPolicyConfig(Settings):
    """Any engine with an OpenAI-compatible API."""

    kind: Literal["openai"]
    """Chooses this policy."""
    base_url: EngineUrl
    """For example `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model, as the engine knows it."""
    api: Literal["chat", "completions"] = "chat"
    """Which endpoint is asked."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key. Unset: no key is sent."""
    request_timeout: PositiveFloat = 120.0
    """Seconds that one request may take."""
    max_retries: Annotated[int, Field(ge=0)] = 5
    """Times that a request is sent again after a passing failure."""
    max_connections: PositiveInt = 4096
    """Most requests at the same time; more wait."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request's body, as the engine knows them."""


PolicyConfig = Annotated[
    RandomPolicyConfig
    | OraclePolicyConfig
    | SimulatedPolicyConfig
    | OpenAIPolicyConfig
    | VllmPolicyConfig
    | SglangPolicyConfig
    | LlamaCppPolicyConfig
    | TorchPolicyConfig,
    Field(discriminator="kind"),
]

POLICY_KINDS: tuple[str, ...] = tuple(
    get_args(each.model_fields["kind"].annotation)[0] for each in get_args(get_args(PolicyConfig)[0])
)
"""The values of `policy.kind`."""
