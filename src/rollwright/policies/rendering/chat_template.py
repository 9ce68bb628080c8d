"""A tokenizer's chat template, as a function from messages to text."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollwright.errors import ConfigError, RollwrightError
from rollwright.policies.rendering.chat import ChatMessage
from rollwright.policies.rendering.tokenizer import Tokenizer

Tools = list[dict[str, Any]] | None


class Refused(RollwrightError):
    """The template does not accept these messages."""


class ChatTemplate:
    """Messages and tools to text, with options that the template is known to read."""

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("renderer 'template': the tokenizer has no chat template")
        for option in options:
            if option not in str(tokenizer.chat_template):
                raise ConfigError(
                    f"renderer 'template': the chat template does not use the option {option!r}"
                )
        self._tokenizer = tokenizer
        self._options = options

    def text(self, messages: Sequence[ChatMessage], tools: Tools, *, ask: bool) -> str:
        """`ask`: go on up to where the assistant's turn begins."""
        from jinja2.exceptions import TemplateError  # with the extra, not with the core

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=ask, tokenize=False, **self._options
            )
        except (TemplateError, TypeError) as error:
            raise Refused(
                f"chat template: it refuses these messages: {' '.join(str(error).split())}"
            ) from error
        return text
