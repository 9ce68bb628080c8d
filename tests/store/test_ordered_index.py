"""The ordered index of the memory store against a plain sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from rollwright.store.memory.index import OrderedIndex

steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 8), st.integers(0, 20)),
        st.tuples(st.just("discard"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.just(0)),
    ),
    max_size=300,
)


@given(steps)
def test_it_always_knows_its_first_key(steps: list[tuple[str, int, int]]) -> None:
    index: OrderedIndex[int] = OrderedIndex()
    model: dict[int, tuple[float, int]] = {}
    for step, key, order in steps:
        expected = min(model, key=lambda each: model[each], default=None)
        if step == "set":
            index.set(key, (order, key))
            model[key] = (order, key)
        elif step == "discard":
            index.discard(key)
            model.pop(key, None)
        else:
            assert index.pop() == expected
            if expected is not None:
                del model[expected]
        smallest = min(model.values(), default=None)
        assert len(index) == len(model)
        assert smallest is None or index.bound <= smallest[0]
        first = index.first()
        assert (first[0] if first else None) == smallest


def test_keys_that_move_on_and_leave_do_not_fill_the_memory() -> None:
    index: OrderedIndex[int] = OrderedIndex()
    for number in range(10_000):
        index.set(number, (number, number))
        index.set(number, (number + 5, number))
        index.discard(number - 10)
    assert len(index) == 10
    assert len(index._heap) < 200
