import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.envs.parsing import ANSWER_PATTERN, THINK_PATTERN, AnswerFormat
from rollwright.errors import ConfigError


@pytest.mark.parametrize(
    ("completion", "action"),
    [
        ("<answer>Up</answer>", "Up"),
        ("I go up. <answer> Up\n</answer> Done.", "Up"),
        ("<answer>Up</answer><answer>Down</answer>", "Up"),
        ("<answer>Move\nUp</answer>", "Move\nUp"),
        ("<answer><|im_start|>Up<|im_end|></answer>", "Up"),
        ("<answer></answer>", ""),
        ("<answer>Up", None),
        ("Up", None),
        ("<Answer>Up</Answer>", None),
        ("", None),
    ],
)
def test_the_action_is_what_the_first_pair_of_tags_holds(completion: str, action: str | None) -> None:
    assert AnswerFormat().find(completion) == action


def test_the_thinking_format_wants_both_parts() -> None:
    answers = AnswerFormat(THINK_PATTERN)
    assert answers.find("<think>left is a hole</think>\n<answer>Up</answer>") == "Up"
    assert answers.find("<answer>Up</answer>") is None
    assert "<think>" in answers.request("one action", "Up")


@given(st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs"])))
def test_what_is_written_is_found_again(action: str) -> None:
    for pattern in (ANSWER_PATTERN, THINK_PATTERN):
        answers = AnswerFormat(pattern)
        assert answers.find(answers.write(action)) == action.strip()


def test_a_pattern_of_ones_own_brings_its_template() -> None:
    answers = AnswerFormat(r"ACTION:(.*)", "ACTION: {action}")
    assert answers.find(answers.write("Left")) == "Left"


@pytest.mark.parametrize(
    ("pattern", "template", "words"),
    [
        ("(", None, "not a regular expression"),
        ("<answer>.*</answer>", None, "needs a group"),
        (r"ACTION:(.*)", None, "give answer_template"),
        (r"ACTION:(.*)", "<answer>{action}</answer>", "that the pattern finds"),
        (r"<answer>(.*?)</answer>", "<answer>Up</answer>", "that the pattern finds"),
    ],
)
def test_a_format_that_no_answer_could_have_is_refused(
    pattern: str, template: str | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        AnswerFormat(pattern, template)


def test_a_pattern_may_list_the_actions() -> None:
    answers = AnswerFormat(r"(?i)\b(left|right)\b", "{action}", example="Left")
    assert answers.find("I go LEFT now") == "LEFT"
    with pytest.raises(ConfigError, match="that the pattern finds"):
        AnswerFormat(r"(?i)\b(left|right)\b", "{action}", example="Up")


PIECES = ["<answer>", "</answer>", "<Answer>", "</Answer>", "<think>", "</think>", "Up", " ", "\n"]


@pytest.mark.parametrize(
    ("pattern", "template"),
    [
        (ANSWER_PATTERN, None),
        (THINK_PATTERN, None),
        (r"(?i)<answer>(.*?)</answer>", None),
        (r"<answer>.*?</answer> (\w+)|(Some Action)", "{action}"),
    ],
)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_the_action_is_the_one_that_the_pattern_finds(
    pattern: str, template: str | None, pieces: list[str]
) -> None:
    completion = "".join(pieces)
    match = re.search(pattern, completion, re.DOTALL)
    found = None if match is None else (match[match.re.groups] or "").strip()
    assert AnswerFormat(pattern, template).find(completion) == found


def test_a_model_that_repeats_the_opening_tag_without_end_holds_nobody_up() -> None:
    """A search from every opening tag to the end would take minutes."""
    assert AnswerFormat().find("<answer>" * 100_000) is None
    assert AnswerFormat().find("</answer>" + "<answer>" * 100_000) is None
