"""The generic renderer, which follows the chat template of any tokenizer.

A template renders whole conversations, but a prompt must be extended: encoding the history again could give other ids than
those that were sampled. So the template is probed once, when the renderer is made (see `probing`). From then on a turn
renders a stand-in exchange (a question and an answer made of marks) together with the new messages, and takes the text
behind the stand-in's answer. The probe has shown that this text does not depend on the turns before it.

Always true: sampled ids are never encoded again; the cost of a turn follows its new messages, not the length of the episode;
where the template rewrites earlier turns, `extend` returns `None` and `restart_reason` says why.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Self

import msgspec

from rollwright.engines.base import Parsed, ToolSpec
from rollwright.engines.rendering.chat import ChatMessage, as_parsed, chat, last_turn, tool_call, tool_specs
from rollwright.engines.rendering.package import library
from rollwright.engines.rendering.probing import (
    ANSWER,
    QUESTION,
    ChatTemplate,
    Continuation,
    TemplateRefused,
    Tools,
    assistant,
    probe,
    user,
)
from rollwright.engines.rendering.tokenizer import Tokenizer, decode, longest_token
from rollwright.errors import ConfigError
from rollwright.trajectory import FinishReason, Message, TokenIds, token_ids

CACHED_PROMPTS = 1024
"""First prompts whose ids are cached: all members of a group begin with the same one."""
CACHED_PROMPT_LENGTH = 4096
"""Characters of the longest cached prompt; the cache takes a few megabytes in all."""


class EndMark(msgspec.Struct, frozen=True):
    """The special token that ends an answer in the history."""

    id: int
    text: str
    before: str
    """Text between the answer and the mark; mostly empty."""


class TemplateRenderer:
    """Renders for any model whose tokenizer has a chat template; token-exact where the template is stable."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_tokens: Sequence[str] = (),
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        **template_options: Any,
    ) -> None:
        """`stop_tokens`: tokens that end a turn, beside the template's end mark and the tokenizer's end of sequence. The
        parsers are those of the `renderers` package; without them a completion is all content. Other options are variables of
        the template."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template_options)
        self._continuation = self._probe(None)
        self._continuation_with_tools: Continuation | None = None
        """Probed when tools are first given: some templates write them into the latest message, which makes them unstable."""
        self._mark = self._find_end_mark()
        self._stop_ids = self._find_stop_ids(stop_tokens)
        self.longest_token = longest_token(tokenizer)
        self._parser = _make_parser(tokenizer, tool_parser, reasoning_parser)
        self._prompts: OrderedDict[tuple[Message, ...], TokenIds] = OrderedDict()
        """Cached prompts without tools, the least recently used first."""

    def with_tokenizer(self, wrap: Callable[[Tokenizer], Tokenizer]) -> Self:
        """A copy of the renderer whose tokenizer is wrapped; the wrapper must give the same ids."""
        other = copy.copy(self)
        other._tokenizer = wrap(self._tokenizer)
        other._prompts = OrderedDict()
        return other

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def restart_reason(self) -> str:
        """Why every turn starts a new sequence; empty: turns extend the sequence."""
        return self._continuation.restart_reason

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TokenIds:
        key = tuple(messages)
        if (known := None if tools else self._prompts.get(key)) is not None:
            self._prompts.move_to_end(key)
            return known[:]  # a copy, because arrays of ids are mutable
        text = self._template.render(
            chat(messages, read_arguments=True), tool_specs(tools), add_generation_prompt=True
        )
        ids = token_ids(self._encode(text))
        if not tools and len(text) <= CACHED_PROMPT_LENGTH:
            self._prompts[key] = ids[:]
            if len(self._prompts) > CACHED_PROMPTS:
                self._prompts.popitem(last=False)
        return ids

    def extend(
        self,
        prompt: TokenIds,
        sampled: TokenIds,
        finish: FinishReason,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> TokenIds | None:
        # `finish` is not consulted: a stop string finishes a sample without the end mark, so only the ids tell.
        specs = tool_specs(tools)
        roles = self._continuation_for(specs).roles
        if not messages or any(message.role not in roles for message in messages):
            return None
        behind = self._text_behind_answer(chat(messages, read_arguments=True), specs)
        return None if behind is None else self._encode_behind(sampled, behind)

    def parse(self, prompt: TokenIds, sampled: TokenIds, tools: Sequence[ToolSpec] = ()) -> Parsed:
        if self._parser is None:
            return Parsed(self.decode(sampled))
        before = last_turn(prompt, self._stop_ids).tolist()
        made = self._parser.parse_response(sampled.tolist(), tools=tool_specs(tools), prompt_ids=before)
        return as_parsed(made, prompt, sampled)

    def decode(self, ids: TokenIds) -> str:
        return decode(self._tokenizer, [each for each in ids if each not in self._stop_ids])

    def _probe(self, specs: Tools) -> Continuation:
        return probe(lambda messages, ask: self._template.render(messages, specs, add_generation_prompt=ask))

    def _continuation_for(self, specs: Tools) -> Continuation:
        if specs is None:
            return self._continuation
        if self._continuation_with_tools is None:
            self._continuation_with_tools = self._probe(specs)
        return self._continuation_with_tools

    def _text_behind_answer(self, messages: list[ChatMessage], specs: Tools) -> str | None:
        """The text from the end of the assistant's answer to the start of its next turn."""
        behind = self._text_behind_calls(messages, specs)
        if behind is None:
            exchange = [user(QUESTION), assistant(ANSWER), *messages]
            behind = self._template.render(exchange, specs, add_generation_prompt=True).partition(ANSWER)[2]
        mark = self._mark
        # The probe saw the end mark behind an answer. If these messages suppress it, the ids cannot be extended safely.
        return behind if mark is None or behind.startswith(mark.before + mark.text) else None

    def _text_behind_calls(self, messages: list[ChatMessage], specs: Tools) -> str | None:
        """The text behind an answer with tool calls that match the tool messages.

        `None`: no tool message comes first, or the template renders the calls differently once they are answered.
        """
        if messages[0]["role"] != "tool":
            return None
        # Many templates refuse a tool message without a matching call, or look the tool's name up in the call.
        answers = [message for message in messages if message["role"] == "tool"]
        calls = [tool_call(each.get("tool_call_id", ""), each.get("name", ""), {}) for each in answers]
        exchange = [user(QUESTION), assistant(ANSWER) | {"tool_calls": calls}]
        try:
            called = self._template.render(exchange, specs, add_generation_prompt=False)
            text = self._template.render([*exchange, *messages], specs, add_generation_prompt=True)
        except TemplateRefused:
            return None
        # The stand-in's calls end where the text before the end mark ends. There is no mark of ours behind the calls to
        # search for, because each format writes them in its own way.
        last = self._continuation.last
        body = called.removesuffix(last)
        if not text.startswith(body):
            return None
        # A format may end a turn with calls by another token (`<|eom_id|>`). The usual end of a turn is put in front, so
        # that a sample which was cut off ends like any other; `_encode_behind` drops it where the sample has an end.
        return text[len(body) :] if called.endswith(last) else last + text[len(body) :]

    def _encode_behind(self, sampled: TokenIds, behind: str) -> TokenIds:
        """The ids of `behind`, without the end mark if the sample has it already."""
        # The mark is encoded together with the text behind it, because a tokenizer may treat the start of a text
        # differently from text behind a special token (a space added in front, for example).
        ids = token_ids(self._encode(behind))
        if not sampled or sampled[-1] not in self._stop_ids:
            return ids
        if self._mark is not None:
            return ids[ids.index(self._mark.id) + 1 :]
        # Without an end mark an answer ends where the next message starts, and the model may have sampled that start.
        return ids[1:] if ids[:1] == sampled[-1:] else ids

    def _find_end_mark(self) -> EndMark | None:
        """The end mark; `None`: an answer ends where the next message starts, or with the sequence."""
        continuation = self._continuation
        mark = self._first_special(continuation.between)
        # A special token between two messages that is absent behind the last one starts the next message: no end mark.
        if mark is None or self._first_special(continuation.last) is None:
            return None
        text = self._tokenizer.convert_ids_to_tokens(mark)
        return EndMark(mark, text, before=continuation.between.partition(text)[0])

    def _find_stop_ids(self, extra: Sequence[str]) -> tuple[int, ...]:
        """Ids that end a turn: the end of the template's last message, the end of the sequence, and `extra`."""
        found = [self._first_special(self._continuation.last), self._tokenizer.eos_token_id]
        if self._mark is not None:
            found.append(self._mark.id)
        for token in extra:
            ids = self._encode(token)
            if len(ids) != 1:
                raise ConfigError(
                    f"renderer 'template': stop token {token!r} is not one token of this vocabulary"
                )
            found += ids
        stops = tuple(dict.fromkeys(each for each in found if each is not None))
        if not stops:
            raise ConfigError(
                "renderer 'template': nothing ends a turn in this chat template, and the tokenizer has no "
                "end-of-sequence token; name one in `stop_tokens`"
            )
        return stops

    def _first_special(self, text: str) -> int | None:
        """The first special token of a text."""
        # `all_special_ids` may lack tokens that were added as special without a role of their own.
        marks = {number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        marks.update(self._tokenizer.all_special_ids)
        return next((each for each in self._encode(text) if each in marks), None)

    def _encode(self, text: str) -> list[int]:
        # Templates write the beginning-of-sequence token themselves; a second one would change the distribution.
        return self._tokenizer.encode(text, add_special_tokens=False)


def _make_parser(tokenizer: Tokenizer, tool_parser: str | None, reasoning_parser: str | None) -> Any:
    """The package's parser of tool calls and reasoning; `None`: neither is configured."""
    if tool_parser is None and reasoning_parser is None:
        return None
    base, configs = library(), import_module("renderers.configs")
    settings = configs.DefaultRendererConfig(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    try:
        return base.create_renderer(tokenizer, settings)
    except ValueError as error:
        raise ConfigError(f"renderer 'template': {error}") from error
