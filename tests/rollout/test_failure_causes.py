"""Failures are counted by their root cause, in the words of whatever failed."""

import pytest

from rollwright.rollout.accounting import MAX_CAUSES, FailureCauses, root_cause, same_cause

REFUSED = (
    "engine: EngineError: http://127.0.0.1:{port}/v1: Cannot connect to host 127.0.0.1:{port}: "
    "Connection refused (after {tries} tries)"
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (REFUSED.format(port=8000, tries=6), REFUSED.format(port=9001, tries=2)),
        ("agent: KeyError: lake.train-g0-m7", "agent: KeyError: lake.train-g31-m0"),
        (
            "request 0b1c9f5e-9d6f-4a51-8f43-3ce1b6d36d0b failed",
            "request 9d6f0b1c-0000-4a51-8f43-3ce1b6d36d0b failed",
        ),
        ("<Env at 0x7f11aa> broke", "<Env at 0x7f22bb> broke"),
        ("no file /tmp/tmpabc123x_/a", "no file /tmp/tmpzz9xq_1a/a"),
    ],
)
def test_what_names_one_case_does_not_split_a_cause(one: str, other: str) -> None:
    assert same_cause(one) == same_cause(other)


@pytest.mark.parametrize(
    ("one", "other"), [("HTTP 401: no", "HTTP 403: no"), ("Connection refused", "Connection reset")]
)
def test_different_answers_are_different_causes(one: str, other: str) -> None:
    assert same_cause(one) != same_cause(other)


def test_a_cause_is_told_in_the_words_of_the_first_message_with_a_rollout_to_look_at() -> None:
    causes = FailureCauses()
    causes.add("environment: RuntimeError: fell off", "g9-m0")
    for member in range(3):
        causes.add(REFUSED.format(port=8000 + member, tries=6), f"g0-m{member}")
    first = causes.most_common(1)[0]
    assert (first.count, first.example) == (3, "g0-m0")
    assert str(first).endswith("127.0.0.1:8000: Connection refused (for example g0-m0)")
    again = FailureCauses.of(causes.rows())
    assert again.rows() == causes.rows()
    again.update(causes)
    assert again.total == 2 * causes.total == 8


def test_messages_that_are_all_different_do_not_fill_the_memory() -> None:
    causes = FailureCauses()
    for number in range(3 * MAX_CAUSES):
        causes.add("it said " + "".join("abcdefghij"[int(each)] for each in str(number)))
    assert causes.total == 3 * MAX_CAUSES
    assert len(causes.rows()) == MAX_CAUSES + 1


def test_a_message_of_many_lines_is_one_line_and_not_too_long() -> None:
    assert "\n" not in root_cause("a\n b" * 1000)
    assert len(root_cause("a\n b" * 1000)) < 300
