"""The generic renderer follows any stable chat template, token for token, and says where a template is not stable."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.base import ToolSpec
from rollwright.engines.rendering import TemplateRenderer
from rollwright.errors import ConfigError, RollwrightError
from rollwright.models.tiny import tiny_tokenizer
from rollwright.trajectory import FinishReason, Message, TokenIds, ToolCall, token_ids

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2-135M-Instruct has it (Apache-2.0)."""

WORD_TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)

TURNS = 8
TOOL = ToolSpec("look", "Looks.", {"type": "object", "properties": {"where": {"type": "string"}}})
CORPUS = ["user assistant system You are a helpful AI assistant. Go left or right? I go right.\n"] * 4
STOPPED, CUT = FinishReason.STOP, FinishReason.LENGTH


def tokenizer(template: str | None, *special: str, eos: str = "<|im_end|>") -> Any:
    made = tiny_tokenizer(CORPUS, 400)
    made.add_tokens(list(special), special_tokens=True)
    made.eos_token = eos
    made.chat_template = template
    return made


@cache
def smollm2() -> tuple[Any, TemplateRenderer]:
    made = tokenizer(SMOLLM2_TEMPLATE, "<|endoftext|>")
    return made, TemplateRenderer(made)


def encode(tokenizer: Any, text: str) -> TokenIds:
    return token_ids(tokenizer.encode(text, add_special_tokens=False))


def canonical(tokenizer: Any, messages: list[Message]) -> TokenIds:
    """The whole conversation by transformers alone."""
    chat = [{"role": each.role, "content": each.content} for each in messages]
    return token_ids(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=TURNS, max_size=TURNS))
def test_eight_turns_on_smollm2_are_what_the_template_makes_of_the_whole(
    turns: list[tuple[str, str]],
) -> None:
    made, renderer = smollm2()
    history = [Message("user", "begin")]
    prompt = renderer.open(history)
    for said, then in turns:
        sampled = encode(made, said + "<|im_end|>")
        history += [Message("assistant", said), Message("user", then)]
        added = renderer.extend(prompt, sampled, STOPPED, history[-1:])
        assert added is not None
        prompt = prompt + sampled + added
        assert prompt == canonical(made, history)


IDS = st.lists(st.integers(2, 399), max_size=12)
"""Any ordinary ids in any order: mostly not what the tokenizer would make of their text."""


@given(st.lists(st.tuples(IDS, st.booleans(), TEXTS), min_size=TURNS, max_size=TURNS))
def test_whatever_was_sampled_stays_and_the_new_ids_do_not_depend_on_it(
    turns: list[tuple[list[int], bool, str]],
) -> None:
    made, renderer = smollm2()
    end = made.convert_tokens_to_ids("<|im_end|>")
    prompt = renderer.open([Message("user", "begin")])
    for ids, ended, then in turns:
        sampled = token_ids([*ids, end] if ended else ids)
        new = [Message("user", then)]
        added = renderer.extend(prompt, sampled, STOPPED if ended else CUT, new)
        closing = "" if ended else "<|im_end|>"
        assert added == encode(
            made, f"{closing}\n<|im_start|>user\n{then}<|im_end|>\n<|im_start|>assistant\n"
        )
        prompt = prompt + sampled + added


@pytest.mark.parametrize("finish", list(FinishReason))
def test_a_sample_gets_the_end_mark_that_it_lacks_and_never_a_second(finish: FinishReason) -> None:
    made, renderer = smollm2()
    prompt, end = renderer.open([Message("user", "hi")]), made.convert_tokens_to_ids("<|im_end|>")
    cut = encode(made, "I go right")
    new = [Message("user", "and then?")]
    added = renderer.extend(prompt, cut, finish, new)
    ended = renderer.extend(prompt, cut + token_ids([end]), finish, new)
    assert added is not None
    assert added[0] == end
    assert ended == added[1:]
    assert renderer.extend(prompt, token_ids(), finish, new) == added


def test_another_end_of_sequence_id_also_ends_the_turn() -> None:
    made = tokenizer(SMOLLM2_TEMPLATE, "<|endoftext|>")
    renderer = TemplateRenderer(made, stop_tokens=["<|endoftext|>"])
    end, other = (made.convert_tokens_to_ids(each) for each in ("<|im_end|>", "<|endoftext|>"))
    assert renderer.stop_ids == (end, other)
    prompt, new = renderer.open([Message("user", "hi")]), [Message("user", "more")]
    assert renderer.extend(prompt, token_ids([5, other]), STOPPED, new) == renderer.extend(
        prompt, token_ids([5, end]), STOPPED, new
    )


def test_completions_are_read_without_end_marks() -> None:
    made, renderer = smollm2()
    sampled = encode(made, "I go right<|im_end|>")
    assert renderer.decode(sampled) == "I go right"
    assert renderer.parse(renderer.open([Message("user", "hi")]), sampled).content == "I go right"


def test_a_word_level_tokenizer_with_a_trivial_template_serves() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["</s>", "[UNK]", "user", "assistant", ":", "go", "left", "right"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="[UNK]")
    made.chat_template = WORD_TEMPLATE
    renderer = TemplateRenderer(made)
    assert renderer.stop_ids == (0,)
    prompt, sampled = renderer.open([Message("user", "go left")]), encode(made, "go right </s>")
    added = renderer.extend(prompt, sampled, STOPPED, [Message("user", "go")])
    assert added == encode(made, "user : go </s> assistant :")
    assert renderer.extend(prompt, sampled[:-1], CUT, [Message("user", "go")]) == token_ids([0]) + added


def test_a_format_that_ends_an_answer_with_the_next_opener_does_not_get_it_twice() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    made = tokenizer(template, "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
    renderer = TemplateRenderer(made, stop_tokens=["<|user|>"])
    prompt, opener = renderer.open([Message("user", "a")]), encode(made, "<|user|>")
    assert renderer.extend(prompt, opener, STOPPED, [Message("user", "b")]) == encode(made, "b<|assistant|>")
    assert renderer.extend(prompt, token_ids([7]), CUT, [Message("user", "b")]) == encode(
        made, "<|user|>b<|assistant|>"
    )


WRITES = "<{{ m.role }}>{{ m.content }}<|im_end|>"
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
UNSTABLE = {
    "numbers from the end": (
        f"{{% for m in messages %}}{{{{ messages | length - loop.index }}}}{WRITES}{{% endfor %}}{ASKS}",
        "before an answer differs",
    ),
    "opens a prompt unlike the history": (
        f"{{% for m in messages %}}{WRITES}{{% endfor %}}{{% if add_generation_prompt %}}<assistant><think>{{% endif %}}",
        "before an answer differs",
    ),
    "has a heading when it is long": (
        f"{{% if messages | length > 3 %}}long{{% endif %}}{{% for m in messages %}}{WRITES}{{% endfor %}}{ASKS}",
        "an earlier turn changes",
    ),
    "numbers its messages": (
        f"{{% for m in messages %}}{{{{ loop.index }}}}{WRITES}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ messages | length + 1 }}<assistant>{% endif %}",
        "depends on the turns before it",
    ),
    "repeats its rules": (
        f"{{% for m in messages %}}{WRITES}{{% if messages[0].role == 'system' %}}!{{% endif %}}{{% endfor %}}{ASKS}",
        "a system message changes later turns",
    ),
    "leaves out later questions": (
        f"{{% for m in messages %}}{{% if loop.first or m.role == 'assistant' %}}{WRITES}{{% endif %}}{{% endfor %}}{ASKS}",
        "does not write a user message",
    ),
    "refuses a second question": (
        "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}"
        f"{{% for m in messages %}}{WRITES}{{% endfor %}}{ASKS}",
        "one question only",
    ),
}


@pytest.mark.parametrize(("template", "why"), UNSTABLE.values(), ids=UNSTABLE)
def test_a_template_that_rewrites_the_past_is_found_out_and_opens_anew(template: str, why: str) -> None:
    renderer = TemplateRenderer(tokenizer(template))
    assert why in renderer.restart_reason
    prompt = renderer.open([Message("user", "a")])
    assert renderer.extend(prompt, token_ids([5]), CUT, [Message("user", "b")]) is None


def test_tools_that_move_to_the_latest_message_open_anew_and_without_tools_nothing_does() -> None:
    template = (
        "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
        "<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    renderer = TemplateRenderer(tokenizer(template))
    prompt, new = renderer.open([Message("user", "a")], [TOOL]), [Message("user", "b")]
    assert renderer.extend(prompt, token_ids([5]), CUT, new, [TOOL]) is None
    assert renderer.extend(prompt, token_ids([5]), CUT, new) is not None


CALLING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'tool' %}{% for c in messages[loop.index0 - 1].tool_calls or [] %}[{{ c.function.name }}]"
    "{% endfor %}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}END{% else %}<|im_end|>{% endif %}{% endfor %}" + ASKS
)
"""Looks a tool's name up in the call that it answers, and ends calls in its own way."""


@pytest.mark.parametrize("end", ["<|im_end|>", "<|call|>"])
def test_a_tool_s_result_is_written_as_behind_the_call_that_it_answers(end: str) -> None:
    made = tokenizer(CALLING.replace("END", end), "<|call|>")
    renderer = TemplateRenderer(made, stop_tokens=["<|call|>"])
    prompt, sampled = renderer.open([Message("user", "a")]), encode(made, "some call") + encode(made, end)
    result = Message("tool", "found", tool_call_id="call00001", name="look")
    added = renderer.extend(prompt, sampled, STOPPED, [result])
    assert added == encode(made, "<tool>[look]found<|im_end|><assistant>")
    assert renderer.extend(prompt, sampled[:-1], CUT, [result]) == encode(made, "<|im_end|>") + added


def test_an_answer_of_the_assistant_is_never_rendered_into_a_continuation() -> None:
    _, renderer = smollm2()
    prompt = renderer.open([Message("user", "a")])
    assert (
        renderer.extend(prompt, token_ids([5]), CUT, [Message("assistant", "b"), Message("user", "c")])
        is None
    )
    assert renderer.extend(prompt, token_ids([5]), CUT, []) is None


BAD_TEMPLATES = {
    None: "no chat template",
    "{{ raise_exception('not today') }}": "not today",
    "nothing of yours": "does not write",
}


@pytest.mark.parametrize(("template", "said"), BAD_TEMPLATES.items())
def test_a_template_that_cannot_serve_is_refused_in_one_line(template: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        TemplateRenderer(tokenizer(template))
    assert "\n" not in str(refused.value)


def test_messages_that_the_template_refuses_are_named_as_such() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    renderer = TemplateRenderer(tokenizer(template))
    with pytest.raises(RollwrightError, match="no tools here"):
        renderer.open([Message("tool", "42")])


def test_an_option_that_the_template_does_not_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not use the option 'enable_thinking'"):
        TemplateRenderer(tokenizer(SMOLLM2_TEMPLATE), enable_thinking=False)


def test_a_stop_token_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="not one token"):
        TemplateRenderer(tokenizer(SMOLLM2_TEMPLATE), stop_tokens=["<|eot_id|>"])


def test_an_unknown_parser_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="qwen3"):
        TemplateRenderer(tokenizer(SMOLLM2_TEMPLATE), tool_parser="quen3")


FOLLOWED = ("cohere", "gemma3", "lfm2", "llama3_2", "phi3", "qwen2_5", "qwen3")
WITH_TOOLS = ("lfm2", "llama3_2", "qwen2_5", "qwen3")
"""Templates of published models, by their file names in the package `trl`."""


def published() -> dict[str, str]:
    """The templates that `trl` carries, without its own variants for training."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        return {}
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    return {
        file.stem: file.read_text(encoding="utf-8") for file in files if not file.stem.endswith("_training")
    }


PUBLISHED = published()
needs_trl = pytest.mark.skipif(
    not PUBLISHED, reason="the package trl, which has the templates, is not installed"
)


def with_template(template: str) -> Any:
    """A tokenizer that has every mark of the template."""
    marks = set(re.findall(r"<[|｜]?[\w▁]+[|｜]?>", template))
    made = tokenizer(template, *sorted(marks - {"<|im_end|>", "<|im_start|>"}), "<s>")
    made.bos_token = "<s>"
    return made


@needs_trl
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_template_is_followed_token_for_token_or_found_out(name: str) -> None:
    made = with_template(PUBLISHED[name])
    try:
        renderer = TemplateRenderer(made)
    except ConfigError:
        assert name not in FOLLOWED
        return
    history = [Message("user", "begin")]
    prompt, end = renderer.open(history), token_ids(renderer.stop_ids[:1])
    for turn in range(TURNS):
        sampled = encode(made, f"answer {turn}") + end
        history += [Message("assistant", f"answer {turn}"), Message("user", f"question {turn}")]
        added = renderer.extend(prompt, sampled, STOPPED, history[-1:])
        if added is None:
            assert renderer.restart_reason
            assert name not in FOLLOWED
            return
        prompt = prompt + sampled + added
        assert prompt == canonical(made, history)


@needs_trl
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_answer_in_published_templates_as_a_whole_render_has_them(name: str) -> None:
    made = with_template(PUBLISHED[name])
    renderer = TemplateRenderer(made)
    asked = [Message("user", "where is it?")]
    call = ToolCall("call00001", "look", '{"where": "left"}')
    called = Message("assistant", "", tool_calls=(call,))
    answer = Message("tool", "nothing", tool_call_id="call00001", name="look")
    prompt = renderer.open(asked, [TOOL])
    whole = renderer.open([*asked, called, answer], [TOOL])
    added = renderer.extend(prompt, encode(made, "some call"), CUT, [answer], [TOOL])
    assert added is not None
    assert whole[-len(added) :] == added
    assert added[0] == renderer.stop_ids[0]
    assert "nothing" not in made.decode(whole[: -len(added)])


def test_a_conversation_that_was_opened_before_is_remembered_and_nobody_shares_its_ids() -> None:
    encoded: list[str] = []

    class Counting:
        """The tokenizer, which notes what it is asked for."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def encode(self, text: str, **options: Any) -> Any:
            encoded.append(text)
            return self.inner.encode(text, **options)

    renderer = TemplateRenderer(tokenizer(SMOLLM2_TEMPLATE, "<|im_start|>", "<|im_end|>")).with_tokenizer(
        Counting
    )
    opening = [Message("user", "Go left or right?")]
    first = renderer.open(opening)
    whole = first[:]
    first.append(0)
    assert renderer.open(opening) == whole
    assert len(encoded) == 1
    assert renderer.open([Message("user", "Go left?")]) != whole
