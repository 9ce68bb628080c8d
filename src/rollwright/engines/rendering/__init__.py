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
"""Name of the renderer that follows the tokenizer's chat template."""

MODEL_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""A published model: owner and name."""


def make_renderer(tokenizer: Tokenizer, name: str = AUTO, **options: Any) -> Renderer:
    """Make a renderer. `name`: a model family of the `renderers` package, `template`, or `auto`.

    `auto` chooses a family if the tokenizer has the exact name of a model that the package knows, else `template`, also for a
    tokenizer loaded from a folder. Similar names do not count, because a fine-tune may have another template than its family.
    `options`: the package's settings for the family, or those of `TemplateRenderer`.
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
    # Importing the package takes a second, which a tokenizer without a model's name need not pay.
    if not MODEL_NAME.fullmatch(tokenizer.name_or_path) or find_spec("renderers") is None:
        return None
    family: str | None = library().MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    return family
