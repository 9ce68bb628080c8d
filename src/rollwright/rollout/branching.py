"""Branch policies: how many answers each question of a tree gets.

Always true: the number of answers to a question depends on the turns before it, and is fixed before any of them is sampled.
The outcome of the answers never changes it; only therefore is an estimate that averages over children unbiased.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from rollwright.rng import KeyPart, generator
from rollwright.rollout.settings import BRANCH_POLICIES
from rollwright.trajectory import Turn

TRUNK = -1
"""Label of the position above the roots."""


@dataclass(frozen=True)
class Node:
    """A question in the tree: the input of a branch policy."""

    depth: int
    """Number of turns before it; 0: the first question of the episode."""
    label: int
    """Label of its branch, for policies that plan ahead."""
    key: tuple[KeyPart, ...]
    """Key of the random draws of this rollout."""
    turn: Turn | None = None
    """The turn before it, with the environment's answer; `None` at the first question."""
    before: Turn | None = None
    """The turn before `turn`."""

    @property
    def uncertainty(self) -> float | None:
        """Mean of -log p over the tokens of the turn before it, in nats: an estimate of its entropy."""
        return _uncertainty(self.turn)

    @property
    def change(self) -> float | None:
        """Absolute difference of that to the turn before."""
        now, then = _uncertainty(self.turn), _uncertainty(self.before)
        return None if now is None or then is None else abs(now - then)


class Branching(Protocol):
    """Decides the number of answers to a question."""

    def labels(self, node: Node) -> Sequence[int]:
        """The branch label of each answer; as many as there are answers, at least one."""
        ...


@dataclass(frozen=True)
class FixedFanOut:
    """The same number of answers to every question of the first `depth` turns."""

    width: int
    depth: int

    def labels(self, node: Node) -> Sequence[int]:
        return (0,) * (self.width if node.depth < self.depth else 1)


@dataclass(frozen=True)
class RandomExpansion:
    """`chains` chains, each a tree of its own; in each of `rounds` rounds, `nodes` questions of each tree, drawn anew
    from all that it has by then, get one more answer, which is played to its end.

    Which questions those are is drawn beforehand, from the first `depth` turns of every branch. A branch that ends
    before the drawn turn is not expanded there.
    """

    chains: int
    nodes: int
    rounds: int
    depth: int

    def labels(self, node: Node) -> Sequence[int]:
        plan = expansion_plan(self, node.key)
        return (*_own(self, node), *plan.get((node.label, node.depth), ()))


Plan = dict[tuple[int, int], list[int]]
"""New branches by the branch and depth at which they start."""


@lru_cache(maxsize=4096)
def expansion_plan(rules: RandomExpansion, key: tuple[KeyPart, ...]) -> Plan:
    draws = generator(*key, "expansion")
    plan: Plan = {}
    labels = iter(range(rules.chains, rules.chains * (1 + rules.nodes * rules.rounds)))
    trees = [[(tree, 1)] for tree in range(rules.chains)]
    for _ in range(rules.rounds):
        for tree in trees:
            questions = [(TRUNK, 0)]
            questions += [(label, depth) for label, start in tree for depth in range(start, rules.depth)]
            for _ in range(rules.nodes):
                label, depth = draws.choice(questions)
                new = next(labels)
                plan.setdefault((label, depth), []).append(new)
                tree.append((new, depth + 1))
    return plan


def _own(rules: RandomExpansion, node: Node) -> Sequence[int]:
    return range(rules.chains) if node.label == TRUNK else (node.label,)


@dataclass(frozen=True)
class Uncertainty:
    """More answers where the uncertainty of the model was high, or changed after an observation."""

    width: int
    depth: int
    threshold: float
    """Nats: after a turn whose sampled tokens have a mean -log p of at least this, there are `width` answers."""
    change: float
    """Nats: likewise after a turn whose mean -log p differs by at least this from the turn before it."""

    def labels(self, node: Node) -> Sequence[int]:
        return (0,) * (self.width if node.depth < self.depth and self._unsure(node) else 1)

    def _unsure(self, node: Node) -> bool:
        if node.uncertainty is None:
            return node.turn is None
        return node.uncertainty >= self.threshold or (node.change or 0.0) >= self.change


@dataclass(frozen=True)
class OwnBranching:
    """A user-defined function of the node that returns the number of answers."""

    name: str
    width: int
    """Upper limit of answers."""
    function: Callable[[Node], int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", BRANCH_POLICIES.function(self.name))

    def labels(self, node: Node) -> Sequence[int]:
        with BRANCH_POLICIES.blame(self.name):
            return (0,) * min(self.width, max(1, int(self.function(node))))


def _uncertainty(turn: Turn | None) -> float | None:
    if turn is None or not turn.logprobs:
        return None
    return -sum(turn.logprobs) / len(turn.logprobs)
