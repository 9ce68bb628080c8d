"""Answers are parsed as data: text within the grammar has the value that Python gives it, other text is refused."""

import operator
import time
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.envs.scoring.grammar import (
    MAX_DEPTH,
    ExpressionBuilder,
    ExpressionGrammar,
    Unreadable,
    is_code,
    parse,
)
from rollwright.envs.scoring.literals import read_literal

COUNTING = ExpressionGrammar(frozenset("+-*/"))
EVERYTHING = ExpressionGrammar(
    frozenset({"+", "-", "*", "/", "**", "<<", ">>"}), has_decimals=True, has_hex=True, has_names=True
)
FRACTIONS = ExpressionBuilder(
    lambda text: Fraction(int(text)),
    lambda base, exponent: base**exponent,
    {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv},
)

NUMBERS = st.integers(0, 999).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(" ".join),
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda each: f"({''.join(each)})"),
        inner.map(lambda each: f"-({each})"),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_an_expression_means_what_python_makes_of_it(text: str) -> None:
    with_fractions = "".join(
        f"Fraction({word})" if word.isdecimal() else word for word in text_and_numbers(text)
    )
    try:
        wanted = eval(with_fractions, {"Fraction": Fraction})  # noqa: S307 - made here
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            FRACTIONS.build(parse(text, COUNTING))
        return
    assert FRACTIONS.build(parse(text, COUNTING)) == wanted


def text_and_numbers(text: str) -> list[str]:
    found = [""]
    for sign in text:
        if sign.isdecimal() != found[-1].isdecimal():
            found.append("")
        found[-1] += sign
    return found


LITERALS = st.recursive(
    st.one_of(
        st.integers(-(10**30), 10**30),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.none(),
        st.text("abcXYZ _-'\"\\\n\t🙂", max_size=8),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple)),
    max_leaves=15,
)


@given(LITERALS)
def test_a_literal_is_read_back(value: object) -> None:
    try:
        found = read_literal(repr(value))
    except Unreadable:
        assert repr(value).count("[") + repr(value).count("(") > 8, "only what is nested too deeply"
        return
    assert found == value
    assert repr(found) == repr(value)


@settings(max_examples=500)
@given(st.one_of(st.text(), st.text("0123456789+-*/()[]{}.,'\"_eExXjJ lambda:=\n")))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (read_literal, lambda each: parse(each, COUNTING), lambda each: parse(each, EVERYTHING)):
        with suppress(Unreadable):  # any other exception fails the test
            read(text)
    assert is_code(text) in (True, False)


LONG = 20_000
SLOW = {
    "letters": "R" * LONG,
    "digits": "9" * LONG,
    "zeros": "0" * LONG,
    "hex": "0x" + "f" * LONG,
    "points": "1." * (LONG // 2),
    "exponents": "1e" * (LONG // 2),
    "opening": "(" * LONG,
    "lists": "[" * LONG,
    "signs": "-" * LONG,
    "powers": "2**" * (LONG // 3) + "2",
    "quotes": "'" * LONG,
    "a long string": "'" + "a" * LONG,
    "backslashes": "'" + "\\" * LONG,
    "spaces": " " * LONG + "x",
    "underscores": "a_" * (LONG // 2),
    "dots": "a ." * (LONG // 3),
    "calls": "f(" * (LONG // 2),
    "a sum": "1+" * (LONG // 2) + "1",
    "commas": "1," * (LONG // 2),
}


@pytest.mark.parametrize("text", SLOW.values(), ids=list(SLOW))
def test_reading_takes_a_time_that_is_linear_in_the_text(text: str) -> None:
    def spent(each: str) -> float:
        began = time.process_time()
        for read in (read_literal, lambda each: parse(each, EVERYTHING), is_code):
            try:
                read(each)
            except Unreadable:
                continue
        return time.process_time() - began

    half = min(spent(text[: LONG // 2]) for _ in range(3))
    whole = min(spent(text) for _ in range(3))
    assert whole < 3 * half + 0.02, "twice the text may take about twice the time"


def test_nesting_is_bounded() -> None:
    fits = "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH
    parse(fits, COUNTING)
    with pytest.raises(Unreadable):
        parse(f"({fits})", COUNTING)
    long = "+".join(["1"] * 3_000)
    assert FRACTIONS.build(parse(long, COUNTING)) == 3_000


@pytest.mark.parametrize(
    "text",
    [
        *(
            "0x10",
            "1e3",
            "2.5",
            "x",
            "pi",
            "2**3",
            "7//2",
            "7%2",
            "5!",
            "1 2",
            "1\n+ 2",
            "1=1",
            "1;2",
            "1_000",
        ),
        *("٣ + ٤", "１+１", "x.y", "x[0]", "f(1)", "'a'", "007", "", "()", "1,2", "not 1", "1 if 1 else 2"),
    ],
)
def test_a_calculation_has_whole_numbers_and_four_operators(text: str) -> None:
    with pytest.raises(Unreadable):
        parse(text, COUNTING)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *(
            (text, True)
            for text in ("exit()", "x.y", "x[0]", "().__class__", "[1]*9", "lambda: 1", "f (1)[0]")
        ),
        *(
            (text, False)
            for text in ("I don't know.", "3(4 + 5)", "25 * 4 = 100", "0 1\n1 0", "is (5 - 1) / 2.")
        ),
    ],
)
def test_code_is_told_from_prose_and_slips_of_the_pen(text: str, code: bool) -> None:
    assert is_code(text) is code
