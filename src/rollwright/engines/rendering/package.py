"""Hand-written renderers of the `renderers` package, one for each model family.

Always true: the package renders the new messages behind `prompt + sampled`, and `extend` checks that these ids are unchanged
in its result. The package gets only the end of the prompt, from the last end-of-turn id on: it reads nothing before that, so
the cost of a turn follows its new messages, not the length of the episode.
"""

import copy
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Self

from pydantic import ValidationError

from rollwright.engines.base import Parsed, ToolSpec
from rollwright.engines.rendering.chat import as_parsed, chat, last_turn, tool_specs
from rollwright.engines.rendering.tokenizer import Tokenizer, decode, longest_token
from rollwright.errors import ConfigError, RollwrightError
from rollwright.trajectory import FinishReason, Message, TokenIds, token_ids

RETENTION = "thinking_retention"
"""The package's option for the reasoning of earlier turns."""

KEEP_THINKING = "all"
"""Default here: earlier reasoning stays in the prompt. Many families drop it when the user speaks again, which would start
a new sequence at every such turn."""

REFUSALS = (ValueError, TypeError, KeyError, AssertionError, RuntimeError)
"""Exceptions of the package for input that it does not accept; it has no error class of its own."""


def library() -> ModuleType:
    """Import the package, which is optional."""
    try:
        return import_module("renderers.base")
    except ImportError as error:
        raise ConfigError(
            f"the renderers package is needed and cannot be imported ({error}): "
            "install rollwright with the extra `engines`"
        ) from error


def families() -> list[str]:
    """The model families that the package knows."""
    return sorted(set(library().MODEL_RENDERER_MAP.values()))


class PackageRenderer:
    """The renderer of one family; `options` are the package's settings for it."""

    def __init__(self, tokenizer: Tokenizer, family: str, **options: Any) -> None:
        self._tokenizer = tokenizer
        self._family = family
        try:
            self._settings = _config(family, options)
            self._renderer = library().create_renderer(tokenizer, self._settings)
        except REFUSALS as error:
            raise ConfigError(f"renderer {family!r}: {_one_line(error)}") from error
        self._stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.longest_token = longest_token(tokenizer)

    def with_tokenizer(self, wrap: Callable[[Tokenizer], Tokenizer]) -> Self:
        """A copy of the renderer whose tokenizer is wrapped; the wrapper must give the same ids."""
        other = copy.copy(self)
        other._tokenizer = wrap(self._tokenizer)
        other._renderer = library().create_renderer(other._tokenizer, self._settings)
        return other

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TokenIds:
        try:
            ids = self._renderer.render_ids(
                chat(messages, read_arguments=False), tools=tool_specs(tools), add_generation_prompt=True
            )
        except REFUSALS as error:
            raise self._refused(error) from error
        return token_ids(ids)

    def extend(
        self,
        prompt: TokenIds,
        sampled: TokenIds,
        finish: FinishReason,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> TokenIds | None:
        # `finish` is not consulted: a stop string finishes a sample without the end mark, so only the ids tell.
        before = last_turn(prompt, self._stop_ids).tolist()
        given = chat(messages, read_arguments=False)
        try:
            bridged = self._renderer.bridge_to_next_turn(
                before, sampled.tolist(), given, tools=tool_specs(tools)
            )
        except REFUSALS as error:
            raise self._refused(error) from error
        if bridged is None:
            return None
        ids = token_ids(bridged.token_ids)
        known = token_ids(before) + sampled
        return ids[len(known) :] if ids[: len(known)] == known else None

    def parse(self, prompt: TokenIds, sampled: TokenIds, tools: Sequence[ToolSpec] = ()) -> Parsed:
        made = self._renderer.parse_response(
            sampled.tolist(), tools=tool_specs(tools), prompt_ids=last_turn(prompt, self._stop_ids).tolist()
        )
        return as_parsed(made, prompt, sampled)

    def decode(self, ids: TokenIds) -> str:
        return decode(self._tokenizer, [each for each in ids if each not in self._stop_ids])

    def _refused(self, error: Exception) -> RollwrightError:
        return RollwrightError(f"renderer {self._family!r} cannot render this: {_one_line(error)}")


def _config(family: str, options: dict[str, Any]) -> Any:
    """The package's settings for a family; an option that contradicts our default wins."""
    kind = type(import_module("renderers.configs").config_from_name(family))
    if RETENTION not in options:
        try:
            return kind(**options, **{RETENTION: KEEP_THINKING})
        except ValueError:
            pass  # an option contradicts the default, or is wrong: then the next line raises
    return kind(**options)


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return " ".join(str(error).split())
