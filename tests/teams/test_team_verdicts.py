"""Verdicts and answers are read from completions by declared rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.teams import BOXED, ReadingRule, Verdict, VerdictRule

OPEN = VerdictRule(malformed=Verdict.APPROVE)
CLOSED = VerdictRule(malformed=Verdict.REJECT)


def test_the_last_verdict_counts() -> None:
    text = "<verify>approve</verify> … no: <verify>reject</verify>"
    assert OPEN.judge(text) == (Verdict.REJECT, False)
    assert OPEN.judge(text + "<verify>approve</verify>") == (Verdict.APPROVE, False)


def test_upper_and_lower_case_are_the_same() -> None:
    assert OPEN.judge("<VERIFY> Reject\n</Verify>") == (Verdict.REJECT, False)


@pytest.mark.parametrize(
    "text", ["", "approve", "reject", "<verify>maybe</verify>", "<verify>reject", "<verify></verify>"]
)
def test_what_a_malformed_verdict_means_is_declared(text: str) -> None:
    assert OPEN.judge(text) == (Verdict.APPROVE, True)
    assert CLOSED.judge(text) == (Verdict.REJECT, True)


@given(st.text(), st.sampled_from(Verdict), st.text().filter(lambda text: "<" not in text))
def test_a_written_verdict_is_read_whatever_stands_around_it(
    before: str, verdict: Verdict, after: str
) -> None:
    for rule in (OPEN, VerdictRule(malformed=Verdict.REJECT, tag="critic", approve="(ok)", reject="n.o.")):
        assert rule.judge(before + rule.write(verdict) + after) == (verdict, False)


def test_words_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="two different words"):
        VerdictRule(malformed=Verdict.APPROVE, approve="Same", reject="same")


TAGGED = ReadingRule(tags=("search", "answer"), think=True)


@pytest.mark.parametrize(
    ("completion", "text", "valid"),
    [
        ("<think>a</think><search>q</search>", "<search>q</search>", True),
        ("<think>a</think> so: <answer>b</answer> and <search>q</search>", "<answer>b</answer>", True),
        ("<think>not <search>this</search></think><answer>b</answer>", "<answer>b</answer>", True),
        ("<search>q</search>", "<search>q</search>", False),
        ("<think>a</think><think>b</think><search>q</search>", "<search>q</search>", False),
        ("</think>a<think><search>q</search>", "<search>q</search>", False),
        ("<think>a</think></search>q<search>", "", False),
        ("<think>a</think>q", "", False),
    ],
)
def test_an_answer_is_one_of_the_tags_behind_the_thoughts(completion: str, text: str, valid: bool) -> None:
    assert TAGGED.read(completion) == (text, valid)


def test_a_whole_completion_is_shown_also_when_it_is_invalid() -> None:
    rule = ReadingRule(pattern=BOXED)
    assert rule.read(r"so \boxed{4}") == (r"so \boxed{4}", True)
    assert rule.read("so 4") == ("so 4", False)


def test_a_wrong_rule_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        ReadingRule(pattern="(")
    with pytest.raises(ValueError, match="letters"):
        ReadingRule(tags=("a b",))
