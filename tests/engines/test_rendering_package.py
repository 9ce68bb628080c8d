"""Families of the `renderers` package, tool calls included: prompts only ever grow, and sampled ids are never made anew.

Their tokenizers are made here: the ordinary ids are nobody's, the special tokens are the family's own.
"""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.base import ToolSpec
from rollwright.engines.rendering import PackageRenderer, Tokenizer
from rollwright.errors import ConfigError, RollwrightError
from rollwright.models.tiny import tiny_tokenizer
from rollwright.trajectory import FinishReason, Message, TokenIds, ToolCall, token_ids

SPECIAL = {
    "qwen3": "<|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>",
    "llama-3": "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|>",
    "glm-4.5": "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|> <think> </think> "
    "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
    "qwen3.5": "<|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think> "
    "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>",
}
CALLS = {
    "qwen3": '<tool_call>\n{"name": "look", "arguments": {"where": "left"}}\n</tool_call>',
    "llama-3": '{"name": "look", "parameters": {"where": "left"}}',
    "glm-4.5": "<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>left</arg_value>\n</tool_call>",
}
"""A call as each family writes it."""

ENDS = {"qwen3": "<|im_end|>", "llama-3": "<|eot_id|>", "glm-4.5": "<|observation|>", "qwen3.5": "<|im_end|>"}
"""What a model of the family samples behind a call."""

OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama-3": {},
    "glm-4.5": {"enable_thinking": False},
    "qwen3.5": {"enable_thinking": True},
}
FAMILIES = list(CALLS)
TOOL = ToolSpec("look", "Looks.", {"type": "object", "properties": {"where": {"type": "string"}}})
CORPUS = ["user assistant system tool look where left right You are a helpful assistant.\n"] * 4
TURNS = 8
STOPPED, CUT = FinishReason.STOP, FinishReason.LENGTH


@cache
def family(name: str) -> tuple[Any, PackageRenderer]:
    made: Any = tiny_tokenizer(CORPUS, 400)
    ordinary = len(made)
    made.add_tokens(SPECIAL[name].split(), special_tokens=True)
    assert ordinary >= 300
    return made, PackageRenderer(made, name, **OPTIONS[name])


def encode(tokenizer: Tokenizer, text: str) -> TokenIds:
    return token_ids(tokenizer.encode(text, add_special_tokens=False))


def answer_to(turn: int) -> Message:
    return Message("tool", f"result {turn}", tool_call_id=f"call{turn:05}", name="look")


@pytest.mark.parametrize("name", FAMILIES)
def test_eight_calls_and_their_results_are_what_a_whole_render_makes_of_them(name: str) -> None:
    made, renderer = family(name)
    history = [Message("system", "Help."), Message("user", "where is it?")]
    prompt = renderer.open(history, [TOOL])
    for turn in range(TURNS):
        sampled = encode(made, CALLS[name] + ENDS[name])
        (call,) = renderer.parse(prompt, sampled, [TOOL]).tool_calls
        history += [Message("assistant", "", tool_calls=(call,)), answer_to(turn)]
        added = renderer.extend(prompt, sampled, STOPPED, history[-1:], [TOOL])
        assert added is not None
        prompt = prompt + sampled + added
        if (
            name != "glm-4.5"
        ):  # its template writes an empty thought before each call that the model did not write
            assert prompt == renderer.open(history, [TOOL])
        assert prompt[-len(added) :] == renderer.open(history, [TOOL])[-len(added) :]


IDS = st.lists(st.integers(2, 299), max_size=12)
"""Any ordinary ids in any order: mostly not what the tokenizer would make of their text."""
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
SAMPLES = st.tuples(IDS, st.booleans(), st.booleans(), st.booleans(), TEXTS)


@pytest.mark.parametrize("name", FAMILIES)
@given(st.lists(SAMPLES, min_size=TURNS, max_size=TURNS))
def test_whatever_was_sampled_stays_in_the_next_prompt_as_it_was(
    name: str, turns: list[tuple[list[int], bool, bool, bool, str]]
) -> None:
    made, renderer = family(name)
    call, end = encode(made, CALLS[name]), encode(made, ENDS[name])
    prompt = renderer.open([Message("user", "begin")], [TOOL])
    for turn, (ids, calls, ended, by_tool, text) in enumerate(turns):
        sampled = token_ids(ids) + (call if calls else token_ids()) + (end if ended else token_ids())
        reply = (
            Message("tool", text, tool_call_id="call00000", name="look") if by_tool else Message("user", text)
        )
        added = renderer.extend(prompt, sampled, STOPPED if ended else CUT, [reply], [TOOL])
        assert added is not None, turn
        again = renderer.extend(prompt, end, STOPPED, [reply], [TOOL])
        assert again is not None
        assert added[-len(again) :] == again  # what is new follows from the new message alone
        assert len(added) - len(again) in ((0,) if ended else (0, 1, 2))  # a cut turn is ended first
        prompt = prompt + sampled + added


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3.5"])  # the last one begins a thought in its prompts
@given(st.lists(st.tuples(IDS, st.booleans(), st.booleans(), TEXTS), min_size=1, max_size=4))
def test_the_end_of_the_prompt_gives_the_same_as_all_of_it(
    name: str, turns: list[tuple[list[int], bool, bool, str]]
) -> None:
    made, renderer = family(name)
    thought = encode(made, "</think>")
    prompt = renderer.open([Message("user", "begin")], [TOOL])
    for ids, thinks, ended, text in turns:
        sampled = token_ids(ids) + (thought if thinks else token_ids())
        sampled += encode(made, ENDS[name]) if ended else token_ids()
        added = renderer.extend(prompt, sampled, STOPPED, [Message("user", text)], [TOOL])
        bridged = renderer._renderer.bridge_to_next_turn(
            prompt.tolist(), sampled.tolist(), [{"role": "user", "content": text}]
        )
        if added is None:
            assert bridged is None
            return
        assert bridged.token_ids == (prompt + sampled + added).tolist()
        prompt = prompt + sampled + added


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_and_broken_ones_are_kept_as_text(name: str) -> None:
    made, renderer = family(name)
    prompt = renderer.open([Message("user", "where?")], [TOOL])
    parsed = renderer.parse(prompt, encode(made, CALLS[name] + ENDS[name]), [TOOL])
    (call,) = parsed.tool_calls
    assert call.name == "look"
    assert json.loads(call.arguments) == {"where": "left"}
    assert parsed.malformed == ()
    assert renderer.parse(prompt, encode(made, CALLS[name] + ENDS[name]), [TOOL]).tool_calls == (call,)
    assert renderer.parse(prompt + prompt, encode(made, CALLS[name]), [TOOL]).tool_calls[0].id != call.id


def test_arguments_are_handed_on_as_the_model_wrote_them() -> None:
    made, renderer = family("qwen3")
    prompt = renderer.open([Message("user", "where?")], [TOOL])
    written = '{"where":   "l\\u00e9ft", "deep": 1.0}'
    sampled = encode(made, f'<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call><|im_end|>')
    assert [each.arguments for each in renderer.parse(prompt, sampled, [TOOL]).tool_calls] == [written]


def test_what_only_looks_like_a_call_is_malformed_and_calls_beside_it_are_read() -> None:
    made, renderer = family("qwen3")
    prompt = renderer.open([Message("user", "where?")], [TOOL])
    broken = '<tool_call>\n{"name": "look", "arguments": {"where": \n</tool_call>'
    parsed = renderer.parse(prompt, encode(made, broken + CALLS["qwen3"] + "<|im_end|>"), [TOOL])
    assert len(parsed.tool_calls) == 1
    assert len(parsed.malformed) == 1
    assert parsed.malformed[0].endswith('"where":')


def test_a_call_of_a_tool_that_does_not_exist_is_still_a_call() -> None:
    made, renderer = family("glm-4.5")
    prompt = renderer.open([Message("user", "where?")], [TOOL])
    parsed = renderer.parse(prompt, encode(made, CALLS["glm-4.5"].replace("look", "jump")), [TOOL])
    assert [each.name for each in parsed.tool_calls] == ["jump"]


def test_reasoning_is_kept_apart_from_the_answer() -> None:
    made, renderer = family("qwen3")
    prompt = renderer.open([Message("user", "where?")])
    sampled = encode(made, "<think>\nleft or right\n</think>\n\nleft<|im_end|>")
    parsed = renderer.parse(prompt, sampled)
    assert (parsed.reasoning.strip(), parsed.content.strip()) == ("left or right", "left")
    assert renderer.decode(sampled) == "<think>\nleft or right\n</think>\n\nleft"


def test_a_thought_that_was_cut_is_closed_before_the_turn_is() -> None:
    made, renderer = family("qwen3")
    prompt = renderer.open([Message("user", "where?")])
    added = renderer.extend(prompt, encode(made, "<think>\nleft or"), CUT, [Message("user", "well?")])
    assert added is not None
    assert made.decode(added).startswith("</think><|im_end|>\n<|im_start|>user\nwell?")


def test_a_thought_that_the_model_ended_its_turn_in_opens_the_conversation_anew() -> None:
    made, renderer = family("qwen3")
    prompt = renderer.open([Message("user", "where?")])
    sampled = encode(made, "<think>\nleft or<|im_end|>")
    assert renderer.extend(prompt, sampled, STOPPED, [Message("user", "well?")]) is None


def test_an_end_mark_inside_a_sample_opens_anew_instead_of_losing_what_follows_it() -> None:
    made, renderer = family("qwen3")
    prompt = renderer.open([Message("user", "where?")])
    sampled = encode(made, "left<|im_end|>right")
    assert renderer.extend(prompt, sampled, CUT, [Message("user", "well?")]) is None


def test_earlier_thoughts_stay_unless_asked_otherwise() -> None:
    made, keeping = family("qwen3")
    dropping = PackageRenderer(made, "qwen3", thinking_retention="tool_cycle")
    sampled = encode(made, "<think>\nleft\n</think>\n\nleft<|im_end|>")
    prompt = keeping.open([Message("user", "where?")])
    assert keeping.extend(prompt, sampled, STOPPED, [Message("user", "well?")]) is not None
    assert dropping.extend(prompt, sampled, STOPPED, [Message("user", "well?")]) is None
    assert dropping.extend(prompt, sampled, STOPPED, [answer_to(1)]) is not None


def test_an_option_that_contradicts_the_default_wins() -> None:
    made: Any = tiny_tokenizer(CORPUS, 400)
    made.add_tokens([*SPECIAL["glm-4.5"].split(), "<tool_response>", "</tool_response>"], special_tokens=True)
    renderer = PackageRenderer(made, "glm-5", clear_thinking=True)
    prompt = renderer.open([Message("user", "where?")])
    assert renderer.extend(prompt, encode(made, "left<|user|>"), STOPPED, [Message("user", "well?")]) is None


def test_an_option_that_a_family_does_not_have_is_refused_in_one_line() -> None:
    made, _ = family("llama-3")
    with pytest.raises(ConfigError, match="enable_thinking") as refused:
        PackageRenderer(made, "llama-3", enable_thinking=False)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_of_another_family_is_refused() -> None:
    made, _ = family("llama-3")
    with pytest.raises(ConfigError, match=r"'qwen3': .*not found in tokenizer"):
        PackageRenderer(made, "qwen3")


def test_what_a_family_cannot_render_is_said() -> None:
    _, renderer = family("llama-3")
    twice = Message("assistant", "", tool_calls=(ToolCall("a", "look", "{}"), ToolCall("b", "look", "{}")))
    with pytest.raises(RollwrightError, match=r"'llama-3' cannot render this: .*single tool call"):
        renderer.open([Message("user", "where?"), twice])
