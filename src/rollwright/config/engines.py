"""Engines that speak token ids, one model for each kind."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rollwright.config.rendering import RendererConfig
from rollwright.settings import EngineUrl, Settings


class EnginePolicyConfig(Settings):
    """What all engines over HTTP share."""

    base_urls: Annotated[list[EngineUrl], Field(min_length=1)]
    """Addresses of engines with the same model, for example `http://127.0.0.1:8000`. An episode stays with one."""
    renderer: RendererConfig
    """The model's tokenizer and chat format, which make the prompts."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key. Unset: no key is sent."""
    request_timeout: PositiveFloat = 600.0
    """Seconds that one request may take."""
    max_retries: Annotated[int, Field(ge=0)] = 5
    """Times that a request is sent again after a passing failure."""
    max_connections: PositiveInt = 4096
    """Most requests at the same time; more wait."""
    outage_patience: NonNegativeFloat = 300.0
    """Seconds that a call waits while no engine is in service."""
    vocabulary_size: PositiveInt | None = None
    """Ids from there on are taken for broken answers. Unset: ids are not checked against it."""
    seeded: bool = True
    """Whether each request carries a seed that follows from its key. Some engines sample faster without."""


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
    """llama.cpp servers; weights cannot be exchanged while they run."""

    kind: Literal["llama_cpp"]
    """Chooses this policy."""
