"""Chat to token ids for real models, such that sampled ids are never made anew.

`make_renderer` chooses: a hand-written renderer of the `renderers` package where it knows the model family, else
`TemplateRenderer`, which finds out from the tokenizer's own chat template how a conversation goes on. Importing this
package imports neither `renderers` nor `transformers`; making a renderer does.
"""

from rollwright.engines.rendering.choice import TEMPLATE, make_renderer
from rollwright.engines.rendering.package import PackageRenderer
from rollwright.engines.rendering.template import TemplateRenderer
from rollwright.engines.rendering.tokenizer import Tokenizer, load_tokenizer

__all__ = ["TEMPLATE", "PackageRenderer", "TemplateRenderer", "Tokenizer", "load_tokenizer", "make_renderer"]
