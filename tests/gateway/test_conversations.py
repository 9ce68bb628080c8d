"""Which turn a conversation goes on from, whatever clients make of what they were told."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.base import ToolSpec, encoded_tools
from rollwright.gateway.anthropic_messages import AnthropicMessages
from rollwright.gateway.chat_completions import ChatCompletions
from rollwright.gateway.conversations import Conversations
from rollwright.trajectory import Message, ToolCall

TEXTS = st.text("ab ", min_size=1, max_size=3)
QUESTIONS = st.lists(st.builds(Message, st.sampled_from(["user", "tool"]), TEXTS), min_size=1, max_size=2)
ARGUMENTS = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 2) | st.booleans() | TEXTS, max_size=3)
LOOK = ToolSpec("look")


def answers(arguments: dict[str, Any], text: str, number: int) -> Message:
    return Message("assistant", text, tool_calls=(ToolCall(f"call_{number}_0", "f", json.dumps(arguments)),))


def written_anew(message: Message) -> Message:
    """As a client may send it back: arguments in another order, other white space, thoughts left out."""
    (call,) = message.tool_calls
    arguments = dict(reversed(json.loads(call.arguments).items()))
    return Message(
        "assistant",
        f" {message.content}\n",
        tool_calls=(ToolCall(call.id, call.name, json.dumps(arguments, indent=2)),),
    )


@given(st.lists(st.tuples(QUESTIONS, ARGUMENTS, TEXTS, st.integers(0, 5)), min_size=1, max_size=8), QUESTIONS)
def test_every_turn_is_found_again_by_its_own_conversation(
    turns: list[tuple[list[Message], dict[str, Any], str, int]], new: list[Message]
) -> None:
    """Turns grow into any tree; each is found by what it was asked and what it said."""
    conversations = Conversations()
    ended: list[list[Message]] = [[]]
    for number, (asked, arguments, text, before) in enumerate(turns):
        messages = [*ended[before % len(ended)], *asked]
        said = answers(arguments, text, number)
        conversations.add(messages, (LOOK,), said, number)
        ended.append([*messages, said])
    for number, whole in enumerate(ended[1:]):
        sent = [written_anew(each) if each.tool_calls else each for each in whole]
        assert conversations.find([*sent, *new], (LOOK,)) == (number, len(whole))
        assert conversations.find([*sent, *new], ()) is None
        assert conversations.until(number) is not None


CONVERSATION = [Message("system", "s"), Message("user", "one"), Message("assistant", "two")]


@pytest.mark.parametrize(
    "changed",
    [
        [Message("system", "S"), *CONVERSATION[1:]],
        [CONVERSATION[0], Message("user", "One"), CONVERSATION[2]],
        [*CONVERSATION[:2], Message("assistant", "too")],
        [*CONVERSATION[:2], Message("assistant", "two", tool_calls=(ToolCall("c", "f", "{}"),))],
        CONVERSATION[1:],
        [*CONVERSATION, Message("user", "three"), Message("assistant", "four")],
        CONVERSATION[:2],
    ],
    ids=["system", "question", "answer", "call", "cut", "longer", "unanswered"],
)
def test_a_conversation_that_was_changed_goes_on_from_nothing(changed: list[Message]) -> None:
    conversations = Conversations()
    conversations.add(CONVERSATION[:2], (), CONVERSATION[2], 0)
    assert conversations.find([*CONVERSATION, Message("user", "more")], ()) == (0, 3)
    assert conversations.find([*changed, Message("user", "more")], ()) is None


def test_equal_answers_are_told_apart_by_the_ids_of_their_calls() -> None:
    conversations = Conversations()
    asked = [Message("user", "one")]
    first, second = (answers({"x": 1}, "", number) for number in range(2))
    conversations.add(asked, (), first, 0)
    conversations.add(asked, (), second, 1)
    more = Message("user", "more")
    assert conversations.find([*asked, first, more], ()) == (0, 2)
    assert conversations.find([*asked, second, more], ()) == (1, 2)
    other = Message("assistant", "", tool_calls=(ToolCall("renamed", "f", '{"x": 1}'),))
    assert conversations.find([*asked, other, more], ()) == (1, 2)


def test_tools_that_are_sent_again_are_decoded_and_encoded_once() -> None:
    tool = {"name": "look", "input_schema": {"type": "object", "properties": {"b": {}, "a": {}}}}
    chat_tool = {"type": "function", "function": {"name": "look", "parameters": tool["input_schema"]}}
    for api, tools in ((AnthropicMessages(), [tool]), (ChatCompletions(), [chat_tool])):
        first, second = (
            api.read(
                msgspec.json.encode(
                    {"max_tokens": 5, "messages": [{"role": "user", "content": said}], "tools": tools}
                )
            )
            for said in ("one", "two")
        )
        assert first.tools is second.tools
        assert encoded_tools(first.tools) is encoded_tools(second.tools)
        assert encoded_tools(first.tools) == encoded_tools(list(first.tools))
