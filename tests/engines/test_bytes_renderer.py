"""The byte-level vocabulary loses nothing, and longer conversations only add ids."""

from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.rendering.bytes import END, VOCABULARY_SIZE, BytesRenderer
from rollwright.trajectory import FinishReason, Message, token_ids

RENDERER = BytesRenderer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_what_is_encoded_is_decoded(text: str) -> None:
    ids = RENDERER.encode(text)
    assert RENDERER.decode(ids) == text
    assert len(ids) == len(text.encode()) + 1
    assert all(0 <= each < VOCABULARY_SIZE for each in ids)


@given(TEXTS, TEXTS, TEXTS)
def test_a_longer_conversation_extends_the_ids_of_the_shorter_one(asked: str, said: str, then: str) -> None:
    first, last = Message("user", asked), Message("user", then)
    prompt, sampled = RENDERER.open([first]), RENDERER.encode(said)
    joined = prompt + sampled + RENDERER.extend(prompt, sampled, FinishReason.STOP, [last])
    assert joined == RENDERER.open([first, Message("assistant", said), last])


def test_a_cut_sample_is_given_the_end_mark_that_it_lacks() -> None:
    assert RENDERER.extend(token_ids(), token_ids(), FinishReason.LENGTH, []) == token_ids(
        [END]
    ) + RENDERER.open([])
