"""Settings of policies and engines, and the plug points of this box."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rollwright.registry import Registry
from rollwright.settings import Device, EngineUrl, Settings, Share, Threads

POLICIES: Registry[Any] = Registry(
    "policies",
    "policy",
    {
        "random": "rollwright.simulation.players:make_random",
        "oracle": "rollwright.simulation.players:make_oracle",
        "simulated": "rollwright.simulation.engine:make_simulated",
        "openai": "rollwright.engines.factory:make_openai",
        "vllm": "rollwright.engines.factory:make_vllm",
        "sglang": "rollwright.engines.factory:make_engine",
        "llama_cpp": "rollwright.engines.factory:make_engine",
        "engine": "rollwright.engines.factory:make_engine",
        "torch": "rollwright.engines.factory:make_torch",
    },
    protocol="rollwright.engines.base:Policy",
    key="policy.kind",
)
"""A built-in policy is built from its settings below; a user's own with `options` as keyword arguments."""

DIALECTS: Registry[Any] = Registry(
    "dialects",
    "dialect",
    {
        "vllm": "rollwright.engines.vllm:VllmDialect",
        "sglang": "rollwright.engines.sglang:SglangDialect",
        "llama_cpp": "rollwright.engines.llama_cpp:LlamaCppDialect",
    },
    protocol="rollwright.engines.dialect:EngineDialect",
    key="policy.dialect",
)

ROUTING: Registry[Any] = Registry(
    "routing",
    "routing rule",
    {
        "sticky": "rollwright.engines.routing:StickyRouting",
        "least_loaded": "rollwright.engines.routing:LeastLoadedRouting",
        "prefix": "rollwright.engines.routing:PrefixRouting",
    },
    protocol="rollwright.engines.routing:RoutingRule",
    key="policy.routing",
)


class SamplingConfig(Settings):
    """How the policy samples during training rollouts; validation always plays at temperature 0."""

    temperature: NonNegativeFloat = 1.0
    """0: always the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the probability mass that is sampled from, likeliest tokens first."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""


class PriceConfig(Settings):
    """Price of a model, in US dollars for a million tokens."""

    prompt: NonNegativeFloat = 0.0
    """Of tokens in prompts."""
    cached: NonNegativeFloat | None = None
    """Of prompt tokens that the API had in its cache. Unset: as `prompt`."""
    completion: NonNegativeFloat = 0.0
    """Of sampled tokens."""
    reasoning: NonNegativeFloat | None = None
    """Of sampled tokens that were reasoning. Unset: as `completion`."""
    call: NonNegativeFloat = 0.0
    """Of one call, in dollars, beside its tokens."""


class RendererConfig(Settings):
    """The tokenizer and the chat format of a model."""

    tokenizer: str
    """A folder with the model's tokenizer, as transformers saves it, or the name of a fetched model."""
    name: str = "auto"
    """A model family of the `renderers` package, such as `qwen3`; `template`: the tokenizer's own chat template; `auto`: by the tokenizer's name, else `template`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of that renderer, for example `enable_thinking: false`."""


class HttpApiConfig(Settings):
    """Requests to an API over HTTP."""

    api_key_env: str | None = None
    """Name of the environment variable that holds the key. Unset: no key is sent."""
    request_timeout: PositiveFloat = 600.0
    """Seconds that one request may take."""
    max_retries: Annotated[int, Field(ge=0)] = 5
    """Retries of a request after a transient failure."""
    max_connections: PositiveInt = 4096
    """Most concurrent requests; further ones wait."""


class EngineServersConfig(HttpApiConfig):
    """Engines over HTTP that serve the same model."""

    base_urls: Annotated[list[EngineUrl], Field(min_length=1)]
    """Addresses of engines with the same model, for example `http://127.0.0.1:8000`."""
    routing: str = "sticky"
    """How calls are divided among them: `sticky` (an episode stays with one engine), `prefix` (where the longest prefix of the
    prompt was computed, so the members of a group come together, unless that engine has too much to do), `least_loaded`, or
    your own as `module:name`."""
    outage_patience: NonNegativeFloat = 300.0
    """Seconds that a call waits while no engine is in service."""
    vocabulary_size: PositiveInt | None = None
    """A response with an id of this size or more is broken. Unset: ids are not checked against it."""
    seeded: bool = True
    """Whether each request carries a seed derived from its key. Some engines sample faster without."""


class EnginePolicyConfig(EngineServersConfig):
    """Settings common to all engines over HTTP."""

    renderer: RendererConfig
    """The model's tokenizer and chat format, which render the prompts."""


class VllmPolicyConfig(EnginePolicyConfig):
    """vLLM servers."""

    kind: Literal["vllm"]
    """Chooses this policy."""
    model: str
    """Name of the model, as the server knows it."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request's body, as the server knows them."""


class SglangPolicyConfig(EnginePolicyConfig):
    """SGLang servers."""

    kind: Literal["sglang"]
    """Chooses this policy."""


class LlamaCppPolicyConfig(EnginePolicyConfig):
    """llama.cpp servers; weights cannot be updated while they run."""

    kind: Literal["llama_cpp"]
    """Chooses this policy."""


class DialectPolicyConfig(EnginePolicyConfig):
    """Engines over HTTP with a dialect of the user or of an installed package."""

    kind: Literal["engine"]
    """Chooses this policy."""
    dialect: str
    """`sglang`, `llama_cpp`, or your own class as `module:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the dialect."""


class TorchServingConfig(Settings):
    """How a model in this process serves its calls."""

    max_batch: PositiveInt | Literal["auto"] = 256
    """Most calls served at a time; further ones are queued. `auto`: the smallest batch at which this machine's processor is
    about as fast as it gets, measured once."""
    batch_invariant: bool = False
    """Whether a call's result is the same to the bit whatever else is in the batch. Several times slower."""
    prefix_cache_mb: Annotated[int, Field(ge=0)] = 512
    """Megabytes of keys and values kept for the next turns of episodes."""


class TorchPolicyConfig(TorchServingConfig):
    """A transformers model in this process: for small models, on a CPU or one GPU."""

    kind: Literal["torch"] = "torch"
    """Chooses this policy."""
    model: str
    """A folder in the format of transformers, the name of a fetched model (`smollm2`), or `owner/name` on a hub. `auto`: a
    model of the pools that fits; `default_large_model_pool`, `default_small_model_pool`: a model of that pool."""
    renderer: str = "auto"
    """The renderer of chats: a family of the `renderers` package, `template` (the model's chat template), or `auto`."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Data type of weights and computation. `auto`: bfloat16 where it is faster, measured once for each machine. Log-probabilities agree with the trainer's to 1e-4 only in `float32`."""
    device: Device = "auto"
    """`cpu`, `mps`, `cuda`, `cuda:1` …, or `auto`: the best available. The variable `CPU_ONLY` takes precedence."""
    threads: Threads = "auto"
    """Threads of torch in the whole process; `OMP_NUM_THREADS` and `MKL_NUM_THREADS` take precedence. `auto`: the cores that
    this process may use, divided by its workers."""
    cache_mb: PositiveInt | None = None
    """Megabytes for keys and values of running calls; calls that do not fit are queued. Unset: the memory that is free beside
    weights and training."""


class RandomPolicyConfig(Settings):
    """Plays any available action with equal probability."""

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
    """Calls served at a time; further ones are queued."""
    tokens_per_second: PositiveFloat = 100.0
    """Speed of one slot."""
    mean_tokens: PositiveFloat = 40.0
    """Mean length of a completion."""
    spread: NonNegativeFloat = 0.6
    """Sigma of the lognormal length distribution: 0 gives equal lengths, 1 and more a heavy tail."""
    skill: Share = 0.7
    """Probability of the oracle's action instead of a random one."""
    script: str | list[dict[str, Any]] | None = None
    """Answers to give instead of the player's: a YAML, JSON or JSONL file with replies (text, tool calls, JSON, reasoning) or
    scenes of them, or its entries. Unset: a player of this skill plays."""
    failure_rate: Share = 0.0
    """Share of calls that fail."""
    hang_rate: Share = 0.0
    """Share of calls that never answer."""
    max_queue: PositiveInt | None = None
    """Most queued calls; further ones are refused as rate-limited. Unset: no limit."""


class OpenAIPolicyConfig(HttpApiConfig):
    """Any engine with an OpenAI-compatible API."""

    kind: Literal["openai"] = "openai"
    """Chooses this policy."""
    base_url: EngineUrl
    """For example `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model, as the engine knows it."""
    api: Literal["chat", "completions"] = "chat"
    """The endpoint."""
    request_timeout: PositiveFloat = 120.0
    """Seconds that one request may take."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request's body, as the engine knows them."""
    token_limit: Literal["auto", "max_tokens", "max_completion_tokens"] = "auto"
    """The request's field with the token limit. `auto`: `max_tokens`, until the API asks for the other one."""
    omit: list[Literal["temperature", "top_p", "stop"]] = Field(default_factory=list)
    """Fields that are not sent, for models that refuse them; the API's own values then hold."""
    compress: bool = False
    """Whether compressed responses are asked for; needs rollwright[hosted]. Behind a proxy they always are."""
    requests_per_minute: PositiveFloat | None = None
    """Limit of the API, kept by all processes of this machine together. Unset: as its headers tell."""
    tokens_per_minute: PositiveFloat | None = None
    """Limit of the API in tokens of prompts and completions, kept in the same way."""
    rate_limit_patience: NonNegativeFloat = 3600.0
    """Seconds that one call waits while the API answers 429, beside `limits.generate_timeout`."""


class OwnPolicyConfig(Settings):
    """Your own policy; `kind: module:name` does the same."""

    kind: Literal["own"]
    """Chooses this policy."""
    policy: str
    """`module:name` of a class with the members of `Policy`, or of a function that returns such an object."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class or function."""


PolicyConfig = Annotated[
    RandomPolicyConfig
    | OraclePolicyConfig
    | SimulatedPolicyConfig
    | OpenAIPolicyConfig
    | VllmPolicyConfig
    | SglangPolicyConfig
    | LlamaCppPolicyConfig
    | DialectPolicyConfig
    | TorchPolicyConfig
    | OwnPolicyConfig,
    Field(discriminator="kind"),
]


def model_name(settings: Any) -> str:
    """Name of a policy's model in price tables and reports: its `model`, or its kind."""
    return str(getattr(settings, "model", None) or settings.kind)


POLICY_KINDS: tuple[str, ...] = tuple(
    get_args(each.model_fields["kind"].annotation)[0] for each in get_args(get_args(PolicyConfig)[0])
)
"""The values of `policy.kind`."""
