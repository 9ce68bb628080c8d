"""The generic renderer: follows whatever chat template the tokenizer comes with.

The template is asked once, when the renderer is made, how conversations go on (see `probing`). From then on a turn
renders a stand-in exchange and the new messages, and takes what stands behind the stand-in's answer: so a turn costs
what is new in it, and nothing that was sampled is ever encoded. Where the template rewrites earlier turns, `extend`
answers `None`, and `restarts` says why.
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
    ASKED,
    SAID,
    ChatTemplate,
    Following,
    Refused,
    Tools,
    assistant,
    probe,
    user,
)
from rollwright.engines.rendering.tokenizer import Tokenizer, decode, longest_token
from rollwright.errors import ConfigError
from rollwright.trajectory import FinishReason, Message, TokenIds, token_ids

REMEMBERED = 1024
"""Conversations whose ids are kept: the members of a group all begin with the same one."""
REMEMBERED_LENGTH = 4096
"""Characters of the longest such conversation; a few megabytes in all."""


class EndMark(msgspec.Struct, frozen=True):
    """The special token that ends an answer in the history."""

    id: int
    text: str
    before: str
    """What the template writes between the answer and the mark; mostly nothing."""


class TemplateRenderer:
    """Serves any model whose tokenizer has a chat template; token-exact where the template is stable."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_tokens: Sequence[str] = (),
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        **template_options: Any,
    ) -> None:
        """`stop_tokens`: what ends a turn beside the template's own mark and the tokenizer's end of sequence. The
        parsers are those of the `renderers` package; without them a completion is all content. Every other option
        is the template's own."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template_options)
        self._following = self._probed(None)
        self._following_with_tools: Following | None = None
        """Found out when tools are first given: some templates write them into the latest message."""
        self._mark = self._end_mark()
        self._stop_ids = self._stops(stop_tokens)
        self.longest_token = longest_token(tokenizer)
        self._parser = _parser(tokenizer, tool_parser, reasoning_parser)
        self._opened: OrderedDict[tuple[Message, ...], TokenIds] = OrderedDict()
        """Conversations without tools, the least recently used first."""

    def with_tokenizer(self, wrap: Callable[[Tokenizer], Tokenizer]) -> Self:
        """The same renderer with something around its tokenizer that gives the same ids."""
        other = copy.copy(self)
        other._tokenizer = wrap(self._tokenizer)
        other._opened = OrderedDict()
        return other

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def restarts(self) -> str:
        """Why conversations are opened anew at every turn; empty: they are not."""
        return self._following.unstable

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TokenIds:
        asked = tuple(messages)
        if (known := None if tools else self._opened.get(asked)) is not None:
            self._opened.move_to_end(asked)
            return known[:]
        text = self._template.text(chat(messages, read_arguments=True), tool_specs(tools), ask=True)
        ids = token_ids(self._encode(text))
        if not tools and len(text) <= REMEMBERED_LENGTH:
            self._opened[asked] = ids[:]
            if len(self._opened) > REMEMBERED:
                self._opened.popitem(last=False)
        return ids

    def extend(
        self,
        prompt: TokenIds,
        sampled: TokenIds,
        finish: FinishReason,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> TokenIds | None:
        # Whether the turn has ended is seen from its ids: after a stop string it has not, whatever `finish` says.
        specs = tool_specs(tools)
        following = self._how(specs)
        if not messages or any(message.role not in following.roles for message in messages):
            return None
        behind = self._behind_answer(chat(messages, read_arguments=True), specs)
        return None if behind is None else self._join(sampled, behind)

    def parse(self, prompt: TokenIds, sampled: TokenIds, tools: Sequence[ToolSpec] = ()) -> Parsed:
        if self._parser is None:
            return Parsed(self.decode(sampled))
        before = last_turn(prompt, self._stop_ids).tolist()
        made = self._parser.parse_response(sampled.tolist(), tools=tool_specs(tools), prompt_ids=before)
        return as_parsed(made, prompt, sampled)

    def decode(self, ids: TokenIds) -> str:
        return decode(self._tokenizer, [each for each in ids if each not in self._stop_ids])

    def _probed(self, specs: Tools) -> Following:
        return probe(lambda messages, ask: self._template.text(messages, specs, ask=ask))

    def _how(self, specs: Tools) -> Following:
        if specs is None:
            return self._following
        if self._following_with_tools is None:
            self._following_with_tools = self._probed(specs)
        return self._following_with_tools

    def _behind_answer(self, messages: list[ChatMessage], specs: Tools) -> str | None:
        """The text from the end of an assistant's answer to the beginning of the next one."""
        behind = self._behind_call(messages, specs)
        if behind is None:
            text = self._template.text([user(ASKED), assistant(SAID), *messages], specs, ask=True)
            behind = text.partition(SAID)[2]
        mark = self._mark
        return behind if mark is None or behind.startswith(mark.before + mark.text) else None

    def _behind_call(self, messages: list[ChatMessage], specs: Tools) -> str | None:
        """The same where tools answer: behind calls that fit the answers, for templates that look at those.

        `None`: nothing is answered here, or the template writes the call differently once it is answered.
        """
        if messages[0]["role"] != "tool":
            return None
        answers = [message for message in messages if message["role"] == "tool"]
        calls = [tool_call(each.get("tool_call_id", ""), each.get("name", ""), {}) for each in answers]
        asked = [user(ASKED), assistant(SAID) | {"tool_calls": calls}]
        try:
            called = self._template.text(asked, specs, ask=False)
            text = self._template.text([*asked, *messages], specs, ask=True)
        except Refused:
            return None
        last = self._following.last
        body = called.removesuffix(last)
        if not text.startswith(body):
            return None
        # A format may end a call in its own way; a sample that was cut then ends as any other.
        return text[len(body) :] if called.endswith(last) else last + text[len(body) :]

    def _join(self, sampled: TokenIds, behind: str) -> TokenIds:
        """The ids of `behind`, less the mark that ends the answer where the sample has it already."""
        # The mark is encoded with the rest, because a tokenizer may treat text differently behind one.
        ids = token_ids(self._encode(behind))
        if not sampled or sampled[-1] not in self._stop_ids:
            return ids
        if self._mark is not None:
            return ids[ids.index(self._mark.id) + 1 :]
        # A format whose answers end where the next message begins: the sample may hold that beginning.
        return ids[1:] if ids[:1] == sampled[-1:] else ids

    def _end_mark(self) -> EndMark | None:
        """`None`: an answer ends where the next message begins, or with the sequence."""
        following = self._following
        mark = self._first_special(following.between)
        if mark is None or self._first_special(following.last) is None:
            return None
        text = self._tokenizer.convert_ids_to_tokens(mark)
        return EndMark(mark, text, before=following.between.partition(text)[0])

    def _stops(self, extra: Sequence[str]) -> tuple[int, ...]:
        """A model ends its turn as the template ends the last one, or with the end of the sequence."""
        found = [self._first_special(self._following.last), self._tokenizer.eos_token_id]
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
        marks = {number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        marks.update(self._tokenizer.all_special_ids)
        return next((each for each in self._encode(text) if each in marks), None)

    def _encode(self, text: str) -> list[int]:
        # The template writes a beginning-of-sequence mark itself where the model has one.
        return self._tokenizer.encode(text, add_special_tokens=False)


def _parser(tokenizer: Tokenizer, tool_parser: str | None, reasoning_parser: str | None) -> Any:
    """Reads calls and reasoning from a completion; `None` when neither is asked for."""
    if tool_parser is None and reasoning_parser is None:
        return None
    base, configs = library(), import_module("renderers.configs")
    settings = configs.DefaultRendererConfig(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    try:
        return base.create_renderer(tokenizer, settings)
    except ValueError as error:
        raise ConfigError(f"renderer 'template': {error}") from error
