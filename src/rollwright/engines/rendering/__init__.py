"""Renderers: chat to token ids for real models, without ever encoding sampled ids again.

`make_renderer` chooses a hand-written renderer of the `renderers` package where that knows the model family, else
`TemplateRenderer`, which learns from the tokenizer's own chat template how a conversation continues. Importing this package
imports neither `renderers` nor `transformers`; making a renderer does.
"""

import re
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from rollwright.engines.base import Renderer
from rollwright.engines.rendering.package import PackageRenderer, families, library
from rollwright.engines.rendering.template import TemplateRenderer
from rollwright.engines.rendering.tokenizer import Tokenizer, load_tokenizer
from rollwright.errors import ConfigError

__all__ = ["TEMPLATE", "PackageRenderer", "TemplateRenderer", "Tokenizer", "load_tokenizer", "make_renderer"]

AUTO = "auto"
TEMPLATE = "template"
"""The name of the renderer that follows the tokenizer's chat template."""

MODEL_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""As models are published: owner and name."""


def make_renderer(tokenizer: Tokenizer, name: str = AUTO, **options: Any) -> Renderer:
    """`name`: a model family that the `renderers` package knows, `template`, or `auto`.

    With `auto` a tokenizer that bears the exact name of a model that the package knows gets its renderer; any other,
    one loaded from a folder too, gets `template`. A fine-tune may come with another template than its family, so
    names are not guessed at. `options` are those of the package's settings for the family or of `TemplateRenderer`.
    """
    if name == AUTO:
        name = _known_family(tokenizer) or TEMPLATE
    if name == TEMPLATE:
        return TemplateRenderer(tokenizer, **options)
    known = families()
    if name not in known:
        near = get_close_matches(name, [AUTO, TEMPLATE, *known], n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"renderer {name!r} does not exist{meant}; there are: auto, template, {', '.join(known)}"
        )
    return PackageRenderer(tokenizer, name, **options)


def _known_family(tokenizer: Tokenizer) -> str | None:
    # The package takes a second to import: not for a tokenizer that bears no model's name.
    if not MODEL_NAME.fullmatch(tokenizer.name_or_path) or find_spec("renderers") is None:
        return None
    family: str | None = library().MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    return family
