"""Constrained decoding for a model in this process, by `llguidance`: which tokens may come next under an output format.

Always true: a completion that ends by itself is JSON that the schema accepts, because a token that would leave the grammar
has probability 0. A schema is compiled once and its matcher copied for each call. A keyword that the library does not know
is not enforced, and logged. Importing this module does not need the library.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import msgspec
import torch

from rollwright.engines.base import OutputFormat, Renderer
from rollwright.engines.rendering.bytes import VOCABULARY_SIZE, BytesRenderer
from rollwright.errors import RollwrightError

CACHED_SCHEMAS = 256
"""Compiled schemas that are kept: an agent repeats a few, and one takes up to a megabyte."""

_COMPACT: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": True,
    "lenient": True,
}
"""One space behind commas and colons, as models write JSON. Free white space would let a weak model write nothing else."""

_encode = msgspec.json.Encoder(order="deterministic").encode
_log = logging.getLogger(__name__)


def is_available() -> bool:
    """Whether the library is installed."""
    return find_spec("llguidance") is not None


class _ByteVocabulary:
    """`BytesRenderer`'s vocabulary, as the library asks for one: ids are bytes, then marks that no text contains."""

    bos_token_id = None
    tokens = tuple(bytes([each]) for each in range(256)) + tuple(
        f"<|{each}|>".encode() for each in range(256, VOCABULARY_SIZE)
    )
    special_token_ids = tuple(range(256, VOCABULARY_SIZE))
    eos_token_id = BytesRenderer.stop_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class OutputMatcher:
    """Where one call is in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocabulary_size: int) -> None:
        self._matcher = matcher
        self._size = vocabulary_size

    @property
    def error(self) -> str:
        """Why no token can follow; empty: one can."""
        return self._matcher.get_error() if self._matcher.is_error() else ""

    def forbidden(self) -> torch.Tensor:
        """A mask over the vocabulary: true for the tokens that may not come next."""
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.reshape(-1)[: self._size] == 0

    def consume(self, token: int) -> None:
        self._matcher.consume_token(token)

    def reset(self) -> None:
        self._matcher.reset()


class OutputCompiler:
    """Compiles output formats for one vocabulary. May be used by several threads."""

    def __init__(self, renderer: Renderer, vocabulary_size: int) -> None:
        self._renderer = renderer
        self._size = vocabulary_size
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        """Made at the first use, because it takes about a second."""
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()

    def matcher(self, output: OutputFormat) -> OutputMatcher:
        """A matcher at the beginning of the text; raises a `RollwrightError` for a schema that the library refuses."""
        key = _encode(output.schema)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._compile(output)
                self._compiled[key] = compiled
                if len(self._compiled) > CACHED_SCHEMAS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return OutputMatcher(compiled.deep_copy(), self._size)

    def _compile(self, output: OutputFormat) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise RollwrightError(
                "forced tool calls and JSON output of a model in this process need llguidance; "
                "install rollwright[constrained]"
            ) from error
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._renderer, self._size, self._renderer.stop_ids)
        try:
            grammar = LLMatcher.grammar_from_json_schema(output.schema, defaults=_COMPACT)
        except ValueError as error:
            raise _refused(output, str(error)) from error
        made = LLMatcher(self._tokenizer, grammar, log_level=0)
        if made.is_error():
            raise _refused(output, made.get_error())
        for warning in made.get_grammar_warnings():
            _log.warning("schema %s: %s", output.name or output.kind, warning)
        return made


def _refused(output: OutputFormat, why: str) -> RollwrightError:
    line = " ".join(why.split())[:300]
    return RollwrightError(f"schema {output.name or output.kind}: cannot be enforced: {line}")


def _tokenizer(renderer: Renderer, size: int, stops: Sequence[int]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    if isinstance(renderer, BytesRenderer):
        return LLTokenizer(TokenizerWrapper(_ByteVocabulary()), n_vocab=size, eos_token=list(stops))
    tokenizer = getattr(renderer, "tokenizer", None)
    if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
        raise RollwrightError(
            f"a {type(renderer).__name__} has no fast tokenizer, and forced tool calls and JSON output need one"
        )
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=size, eos_token=list(stops))
