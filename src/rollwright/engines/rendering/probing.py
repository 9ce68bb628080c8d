"""Probes a chat template: which text ends an assistant turn, and which messages may follow without changing earlier turns.

A chat template is a program that can be run, not read. The probe renders short conversations whose contents are unique
marks and compares the text around the marks. A role may follow an answer if the text up to the answer is the same when it
is a prompt and when it is history, at the first turn and at a later one, and if the text behind the answer depends on the
new messages alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollwright.engines.rendering.chat import ChatMessage
from rollwright.engines.rendering.tokenizer import Tokenizer
from rollwright.errors import ConfigError, RollwrightError

Tools = list[dict[str, Any]] | None


class TemplateRefused(RollwrightError):
    """The template does not accept these messages."""


class ChatTemplate:
    """A tokenizer's chat template as a function from messages and tools to text."""

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("renderer 'template': the tokenizer has no chat template")
        for option in options:
            # jinja ignores unknown variables, so a typo would go unnoticed.
            if option not in str(tokenizer.chat_template):
                raise ConfigError(
                    f"renderer 'template': the chat template does not use the option {option!r}"
                )
        self._tokenizer = tokenizer
        self._options = options

    def render(self, messages: Sequence[ChatMessage], tools: Tools, *, add_generation_prompt: bool) -> str:
        """Render messages; with `add_generation_prompt` up to the start of the assistant's next turn."""
        from jinja2.exceptions import TemplateError  # an optional dependency

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._options,
            )
        except (TemplateError, TypeError) as error:
            raise TemplateRefused(
                f"chat template: it refuses these messages: {' '.join(str(error).split())}"
            ) from error
        return text


Render = Callable[[Sequence[ChatMessage], bool], str]
"""Messages to text; the second argument is `add_generation_prompt`."""

QUESTION, ANSWER, FOLLOW_UP, SECOND_ANSWER, SECOND_FOLLOW_UP, RULES = (f"Zq{number}Zq" for number in range(6))
"""Marks: letters and digits that occur in no template and that no template trims or escapes."""

FOLLOWING_ROLES = ("user", "tool", "system")
"""Roles that may speak after the assistant."""

PROBE_CALL = "call00000"
"""Id of the call that a probing `tool` message answers; nine characters, because some templates accept no other length."""


class Continuation(msgspec.Struct, frozen=True):
    """How a conversation continues behind an assistant's answer."""

    roles: frozenset[str]
    """Roles whose messages can follow without a change of the ids before them."""
    restart_reason: str
    """Why no role can; empty: the user can."""
    last: str
    """Text behind an answer that is the last message."""
    between: str
    """Text between an answer and the content of the user message behind it."""


def user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def assistant(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}


def follow_up(role: str, content: str) -> ChatMessage:
    """A message behind an answer, with the fields that templates expect of the role."""
    made: dict[str, Any] = {"role": role, "content": content}
    return made | ({"tool_call_id": PROBE_CALL, "name": "probe"} if role == "tool" else {})


def probe(render: Render) -> Continuation:
    """Probe a template; raise a `ConfigError` if it cannot render a question and an answer."""
    try:
        asked = render([user(QUESTION)], True)
        answered = render([user(QUESTION), assistant(ANSWER)], False)
    except TemplateRefused as error:
        raise ConfigError(
            f"renderer 'template': {error}; a question and an answer are the least it must accept"
        ) from error
    if QUESTION not in asked or ANSWER not in answered:
        raise ConfigError("renderer 'template': the chat template does not write the contents of messages")
    reasons = {role: _find_instability(render, role) for role in FOLLOWING_ROLES}
    # Every conversation has user messages: if those change the history, stable tool messages do not help.
    unstable = reasons["user"]
    behind = "" if unstable else _text_behind_answer(render)
    return Continuation(
        roles=frozenset() if unstable else frozenset(role for role, reason in reasons.items() if not reason),
        restart_reason=unstable,
        last=answered.rpartition(ANSWER)[2],
        between=behind.partition(FOLLOW_UP)[0],
    )


def _text_behind_answer(render: Render) -> str:
    return render([user(QUESTION), assistant(ANSWER), user(FOLLOW_UP)], True).partition(ANSWER)[2]


def _find_instability(render: Render, role: str) -> str:
    """Why a message of `role` cannot simply be appended behind an answer; empty: it can."""
    start, answer = [user(QUESTION)], assistant(ANSWER)
    try:
        asked = render(start, True)
        followed = render([*start, answer, follow_up(role, FOLLOW_UP)], True)
        again = [
            answer,
            follow_up(role, FOLLOW_UP),
            assistant(SECOND_ANSWER),
            follow_up(role, SECOND_FOLLOW_UP),
        ]
        followed_again = render([*start, *again], True)
    except TemplateRefused as error:
        return f"a {role} message behind an answer: {error}"
    # Thinking models open a prompt with `<think>` and drop it from the history: the sampled ids would not fit.
    if not followed.startswith(asked + ANSWER):
        return "the text before an answer differs between a prompt and the history"
    behind = followed[len(asked + ANSWER) :]
    if FOLLOW_UP not in behind:
        return f"it does not write a {role} message behind an answer"
    # Some templates strip earlier reasoning, or write tools into the latest user message, once there is a later turn.
    if not followed_again.startswith(followed + SECOND_ANSWER):
        return "an earlier turn changes when the conversation continues"
    # The stand-in exchange gives the text behind a first answer, so a template that counts turns cannot use it.
    if followed_again[len(followed + SECOND_ANSWER) :] != behind.replace(FOLLOW_UP, SECOND_FOLLOW_UP):
        return "the text behind an answer depends on the turns before it"
    # The stand-in exchange has no system message, so a later turn must not depend on one.
    return (
        "" if _behind_with_rules(render, role) in (behind, None) else "a system message changes later turns"
    )


def _behind_with_rules(render: Render, role: str) -> str | None:
    """Text behind an answer in a conversation with a system message; `None`: the template accepts none."""
    rules = {"role": "system", "content": RULES}
    try:
        text = render([rules, user(QUESTION), assistant(ANSWER), follow_up(role, FOLLOW_UP)], True)
    except TemplateRefused:
        return None
    return text.partition(ANSWER)[2]
