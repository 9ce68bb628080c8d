"""How chat becomes token ids, for engines that take ids."""

from typing import Any

from pydantic import Field

from rollwright.settings import Settings


class RendererConfig(Settings):
    """Which tokenizer and which chat format a model has."""

    tokenizer: str
    """A folder with the model's tokenizer, as transformers saves it, or the name of a fetched model."""
    name: str = "auto"
    """A model family of the `renderers` package, such as `qwen3`; `template`: the tokenizer's own chat template; `auto`: by the tokenizer's name, else `template`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of that renderer, for example `enable_thinking: false`."""
