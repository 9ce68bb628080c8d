"""Which rows go through the model together. Pure."""

from collections.abc import Sequence

WORTH_A_PASS = 128
"""Padding tokens that cost about as much as one more pass through a small model does for its overhead alone."""


def pack(lengths: Sequence[int], worth_a_pass: int = WORTH_A_PASS) -> list[range]:
    """Cuts rows that are to be fed so many tokens each into runs of neighbours with little padding.

    A row joins the run before it unless the run would then hold more than `worth_a_pass` tokens of padding.
    """
    runs: list[range] = []
    first = total = widest = 0
    for place, length in enumerate(lengths):
        wider = max(widest, length)
        padding = wider * (place - first + 1) - total - length
        if place > first and padding > worth_a_pass:
            runs.append(range(first, place))
            first, total, wider = place, 0, length
        total += length
        widest = wider
    if lengths:
        runs.append(range(first, len(lengths)))
    return runs
