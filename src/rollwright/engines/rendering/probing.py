"""A tokenizer's chat template, as a function from messages to text.

Finds out from a chat template what ends an assistant's turn and which messages may follow without changing it.

It renders short conversations of marked contents and looks at the text around the marks. A role may follow when the
text up to an assistant's answer is the same as a prompt and as history, at the first turn and at a later one, and
when what stands behind the answer depends on the new messages alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollwright.engines.rendering.chat import ChatMessage
from rollwright.engines.rendering.tokenizer import Tokenizer
from rollwright.errors import ConfigError, RollwrightError

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


Render = Callable[[Sequence[ChatMessage], bool], str]
"""Messages to text; the second argument: up to where the assistant's turn begins."""

ASKED, SAID, NEXT, SAID_NEXT, THIRD, RULES = (f"Zq{number}Zq" for number in range(6))
"""Marks: they are in no template, and no template trims or escapes them."""

FOLLOWING_ROLES = ("user", "tool", "system")
"""Who may speak after the assistant."""

PROBE_CALL = "call00000"
"""Id of the call that a probing `tool` message answers."""


class Following(msgspec.Struct, frozen=True):
    """How a conversation goes on behind an assistant's answer."""

    roles: frozenset[str]
    """Whose messages can follow, such that the ids before them stay as they are."""
    unstable: str
    """Why nobody's can; empty: the user's can."""
    last: str
    """What stands behind an answer that is the last message."""
    between: str
    """What stands behind an answer when the user speaks next, up to that message's content."""


def user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def assistant(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}


def follow_up(role: str, content: str) -> ChatMessage:
    made: dict[str, Any] = {"role": role, "content": content}
    return made | ({"tool_call_id": PROBE_CALL, "name": "probe"} if role == "tool" else {})


def probe(render: Render) -> Following:
    """Raises where the template cannot write a plain exchange at all."""
    try:
        asked = render([user(ASKED)], True)
        answered = render([user(ASKED), assistant(SAID)], False)
    except Refused as error:
        raise ConfigError(
            f"renderer 'template': {error}; a question and an answer are the least it must take"
        ) from error
    if ASKED not in asked or SAID not in answered:
        raise ConfigError("renderer 'template': the chat template does not write out what the messages say")
    reasons = {role: _instability(render, role) for role in FOLLOWING_ROLES}
    unstable = reasons["user"]
    behind = "" if unstable else _behind_answer(render)
    return Following(
        roles=frozenset() if unstable else frozenset(role for role, reason in reasons.items() if not reason),
        unstable=unstable,
        last=answered.rpartition(SAID)[2],
        between=behind.partition(NEXT)[0],
    )


def _behind_answer(render: Render) -> str:
    return render([user(ASKED), assistant(SAID), user(NEXT)], True).partition(SAID)[2]


def _instability(render: Render, role: str) -> str:
    """Why a message of `role` cannot simply be added behind an answer; empty: it can."""
    start, answer = [user(ASKED)], assistant(SAID)
    try:
        asked = render(start, True)
        followed = render([*start, answer, follow_up(role, NEXT)], True)
        again = [answer, follow_up(role, NEXT), assistant(SAID_NEXT), follow_up(role, THIRD)]
        followed_again = render([*start, *again], True)
    except Refused as error:
        return f"a {role} message behind an answer: {error}"
    if not followed.startswith(asked + SAID):
        return "what stands before an answer is not the same in a prompt and in the history"
    behind = followed[len(asked + SAID) :]
    if NEXT not in behind:
        return f"it does not write out a {role} message behind an answer"
    if not followed_again.startswith(followed + SAID_NEXT):
        return "an earlier turn is rendered anew when the conversation goes on"
    if followed_again[len(followed + SAID_NEXT) :] != behind.replace(NEXT, THIRD):
        return "what stands behind an answer depends on the turns before it"
    return "" if _with_rules(render, role) in (behind, None) else "a system message changes later turns"


def _with_rules(render: Render, role: str) -> str | None:
    """What follows an answer in a conversation that begins with a system message; `None`: there can be none."""
    rules = {"role": "system", "content": RULES}
    try:
        text = render([rules, user(ASKED), assistant(SAID), follow_up(role, NEXT)], True)
    except Refused:
        return None
    return text.partition(SAID)[2]
