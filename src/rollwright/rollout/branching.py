"""Branch policies: how many answers each question of a tree gets. Each is made of its settings, `width` and `depth`.

Always true: the numbers of answers to all questions of a level are fixed together, from what was played before, and before
any answer of the level is seen. What comes of the answers never changes them; only therefore is an estimate that averages
over children unbiased. A policy may look at all questions of the level, because those are states that were reached, and
given them the next answers are still drawn from the policy alone. It may look at a question's own distribution, too: an
engine tells it with the first answer, but it depends on the question alone, whatever that answer is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, cast

from rollwright.registry import parameters_of
from rollwright.rng import KeyPart, generator
from rollwright.rollout.settings.strategies import (
    BRANCH_POLICIES,
    BranchConfig,
    FixedBranchConfig,
    KeepAliveBranchConfig,
    OwnBranchConfig,
    RandomBranchConfig,
    SplitBranchConfig,
    UncertaintyBranchConfig,
)
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
    entropy: float | None = None
    """Entropy of the distribution of the answer's first token, in nats. `None`: the policy did not ask, or the engine does not
    tell."""

    @property
    def uncertainty(self) -> float | None:
        """Mean of -log p over the tokens of the turn before it, in nats: an estimate of its entropy."""
        return _uncertainty(self.turn)

    @property
    def change(self) -> float | None:
        """Absolute difference of that to the turn before."""
        return _difference(_uncertainty(self.turn), _uncertainty(self.before))

    @property
    def entropy_change(self) -> float | None:
        """Absolute difference of `entropy` to that of the question before."""
        return _difference(self.entropy, None if self.turn is None else self.turn.entropy)


class Branching(Protocol):
    """Decides the number of answers to each question. With a method `asks_entropy(depth)` that returns true, it gets nodes
    with their `entropy`, where the engine tells it."""

    def level(self, nodes: Sequence[Node]) -> Sequence[Sequence[int]]:
        """For each live question of a level, in the order of the tree, the branch label of each of its answers; as many as
        there are answers, at least one."""
        ...


class ByQuestion:
    """Base of policies that look at one question at a time."""

    def labels(self, node: Node) -> Sequence[int]:
        """The branch label of each answer."""
        raise NotImplementedError

    def level(self, nodes: Sequence[Node]) -> Sequence[Sequence[int]]:
        return [self.labels(node) for node in nodes]


@dataclass(frozen=True)
class FixedFanOut(ByQuestion):
    """The same number of answers to every question of the first `depth` turns."""

    width: int
    depth: int
    rules: FixedBranchConfig = field(default_factory=FixedBranchConfig)

    def labels(self, node: Node) -> Sequence[int]:
        return (0,) * (self.width if node.depth < self.depth else 1)


@dataclass(frozen=True)
class Split(ByQuestion):
    """Many roots, and one wide split later: in between, every path is on its own."""

    width: int
    depth: int
    rules: SplitBranchConfig

    def labels(self, node: Node) -> Sequence[int]:
        roots = self.rules.roots if node.depth == 0 else 1
        return (0,) * (roots * self.width if node.depth == self.rules.at else roots)


@dataclass(frozen=True)
class KeepAlive:
    """Refills the live population of the tree before each level: branches that ended are replaced by further answers to the
    questions of those that live."""

    width: int
    depth: int
    rules: KeepAliveBranchConfig

    def level(self, nodes: Sequence[Node]) -> Sequence[Sequence[int]]:
        if nodes[0].depth == 0:
            return [(0,) * self.width for _ in nodes]
        wanted = self.rules.alive if nodes[0].depth < self.depth else 0
        each, rest = divmod(max(wanted, len(nodes)), len(nodes))
        # Who gets one more is drawn anew for each level, so that no branch is favoured for its place in the tree.
        order = generator(*nodes[0].key, "keep_alive", nodes[0].depth).sample(range(len(nodes)), rest)
        return [(0,) * min(each + (place in order), self.width) for place in range(len(nodes))]


@dataclass(frozen=True)
class RandomExpansion(ByQuestion):
    """`chains` chains, each a tree of its own; in each of `rounds` rounds, `nodes` questions of each tree, drawn anew
    from all that it has by then, get one more answer, which is played to its end.

    Which questions those are is drawn beforehand, from the first `depth` turns of every branch. A branch that ends
    before the drawn turn is not expanded there.
    """

    width: int
    depth: int
    rules: RandomBranchConfig

    def labels(self, node: Node) -> Sequence[int]:
        plan = expansion_plan(self.rules, self.depth, node.key)
        own = range(self.rules.chains) if node.label == TRUNK else (node.label,)
        return (*own, *plan.get((node.label, node.depth), ()))


Plan = dict[tuple[int, int], list[int]]
"""New branches by the branch and depth at which they start."""


@lru_cache(maxsize=4096)
def expansion_plan(rules: RandomBranchConfig, depth: int, key: tuple[KeyPart, ...]) -> Plan:
    draws = generator(*key, "expansion")
    plan: Plan = {}
    labels = iter(range(rules.chains, rules.chains * (1 + rules.nodes * rules.rounds)))
    trees = [[(tree, 1)] for tree in range(rules.chains)]
    for _ in range(rules.rounds):
        for tree in trees:
            questions = [(TRUNK, 0)]
            questions += [(label, turn) for label, start in tree for turn in range(start, depth)]
            for _ in range(rules.nodes):
                label, turn = draws.choice(questions)
                new = next(labels)
                plan.setdefault((label, turn), []).append(new)
                tree.append((new, turn + 1))
    return plan


@dataclass(frozen=True)
class Uncertainty(ByQuestion):
    """More answers where the model is unsure, or became more or less sure by an observation."""

    width: int
    depth: int
    rules: UncertaintyBranchConfig

    def labels(self, node: Node) -> Sequence[int]:
        return (0,) * (self.width if node.depth < self.depth and self._unsure(node) else 1)

    def asks_entropy(self, depth: int) -> bool:
        """Whether the questions after so many turns need their entropy."""
        return self.rules.of == "question" and self.width > 1 and depth < self.depth

    def _unsure(self, node: Node) -> bool:
        if node.entropy is not None:
            return node.entropy >= self.rules.threshold or (node.entropy_change or 0.0) >= self.rules.change
        if node.uncertainty is None:
            return node.turn is None
        return node.uncertainty >= self.rules.threshold or (node.change or 0.0) >= self.rules.change


@dataclass(frozen=True)
class OwnBranching:
    """A user-defined function that returns the number of answers: of the node, or of the node and all nodes of its level."""

    width: int
    """Upper limit of answers."""
    depth: int
    rules: OwnBranchConfig
    function: Callable[..., int] = field(init=False, compare=False)
    sees_level: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        function = BRANCH_POLICIES.function(self.rules.function)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "sees_level", len(parameters_of(function)) > 1)

    def level(self, nodes: Sequence[Node]) -> Sequence[Sequence[int]]:
        with BRANCH_POLICIES.blame(self.rules.function):
            wanted = [
                int(self.function(node, nodes) if self.sees_level else self.function(node)) for node in nodes
            ]
        return [(0,) * min(self.width, max(1, count)) for count in wanted]


def make_branching(rules: BranchConfig, width: int, depth: int) -> Branching:
    """The branch policy of these settings."""
    if isinstance(rules, OwnBranchConfig):
        return OwnBranching(width, depth, rules)
    return cast(Branching, BRANCH_POLICIES.find(rules.kind)(width, depth, rules))


def _difference(now: float | None, then: float | None) -> float | None:
    return None if now is None or then is None else abs(now - then)


def _uncertainty(turn: Turn | None) -> float | None:
    if turn is None or not turn.logprobs:
        return None
    return -sum(turn.logprobs) / len(turn.logprobs)
