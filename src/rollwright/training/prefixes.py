"""Rows with a common prefix as one sequence, in which the prefix stands once. Pure; without torch.

Always true: in a bundle, the tokens of each row are the first `shared` tokens of the row before it and then its own, so a
bundle is a tree of tokens in depth-first order, parents before children. Every row is in exactly one bundle. A bundle whose
rows are prefixes of one another is a plain sequence, and needs no attention mask. Rows are joined only where the tokens that
are saved cost more than the attention between branches that a mask throws away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

Ids = NDArray[numpy.int64]


class Member(NamedTuple):
    """One row of a bundle."""

    row: int
    """Index of the row in the batch."""
    shared: int
    """Number of tokens that it has in common with the row before it in the bundle."""


@dataclass(frozen=True)
class Bundle:
    """Rows that are computed as one sequence."""

    members: tuple[Member, ...]
    length: int
    """Number of tokens, each shared one counted once."""
    plain: bool = True
    """Whether the rows are prefixes of one another, so that causal attention is right."""


@dataclass(frozen=True)
class Joining:
    """When two bundles become one."""

    budget: int
    """Most tokens of a bundle, unless a single row is longer."""
    tokens_per_pair: float
    """Cost of the attention of one token to another, in tokens that go through the model."""

    def pays(self, first: Bundle, second: Bundle, shared: int) -> bool:
        length = first.length + second.length - shared
        pairs = length**2 - first.length**2 - second.length**2
        return length <= self.budget and pairs * self.tokens_per_pair < shared


def separate(lengths: Sequence[int]) -> list[Bundle]:
    """A bundle for each row."""
    return [Bundle((Member(row, 0),), length) for row, length in enumerate(lengths)]


def bundle(rows: Sequence[Ids], joining: Joining) -> list[Bundle]:
    """Bundles of all rows, in an order that depends on the rows alone."""
    order = sorted(range(len(rows)), key=lambda row: (rows[row].tobytes(), row))
    # Rows that share a prefix are neighbours now. The stack holds the open nodes of their tree: the path to the last row.
    stack: list[_Node] = [_Node(0, [])]
    for place, row in enumerate(order):
        depth = 0 if place == 0 else _common(rows[order[place - 1]], rows[row])
        _close(stack, depth, joining)
        leaf = Bundle((Member(row, 0),), len(rows[row]))
        if leaf.length > depth:
            stack.append(_Node(leaf.length, [leaf]))
        else:
            stack[-1].below.append(leaf)
    _close(stack, 0, joining)
    return _joined(stack[0], joining)


class _Node(NamedTuple):
    """A place in the tree of all rows."""

    depth: int
    """Tokens that all rows below it have in common."""
    below: list[Bundle]


def _close(stack: list[_Node], depth: int, joining: Joining) -> None:
    """Closes all nodes deeper than `depth`, and leaves one of this depth on top."""
    while stack[-1].depth > depth:
        node = stack.pop()
        found = _joined(node, joining)
        if stack[-1].depth < depth:
            stack.append(_Node(depth, found))
        else:
            stack[-1].below.extend(found)


def _joined(node: _Node, joining: Joining) -> list[Bundle]:
    """The bundles below a node, joined where that pays."""
    found: list[Bundle] = []
    for each in sorted(node.below, key=lambda bundle: (not bundle.plain, -bundle.length)):
        if found and (joined := _join(found[-1], each, node.depth, joining)) is not None:
            found[-1] = joined
        else:
            found.append(each)
    return found


def _join(first: Bundle, second: Bundle, shared: int, joining: Joining) -> Bundle | None:
    members = (*first.members, second.members[0]._replace(shared=shared), *second.members[1:])
    inside = second.length == shared
    if inside and shared:  # nothing is added, whatever the rest of the first looks like
        return Bundle(members, first.length, first.plain)
    if not shared or not joining.pays(first, second, shared):
        return None
    return Bundle(members, first.length + second.length - shared, plain=False)


def _common(first: Ids, second: Ids) -> int:
    """Length of the longest common prefix."""
    size = min(len(first), len(second))
    different = numpy.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size
