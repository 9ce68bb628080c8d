"""How many answers a question gets is fixed beforehand, and never more than the budget allows."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.rollout.branching import (
    TRUNK,
    FixedFanOut,
    Node,
    OwnBranching,
    RandomExpansion,
    Uncertainty,
    expansion_plan,
)
from rollwright.rollout.tree import Budget, BudgetUnit
from rollwright.trajectory import Turn, floats, token_ids

SMALL = st.integers(1, 4)


def sampled(*logprobs: float) -> Turn:
    return Turn(0, None, None, sampled_ids=token_ids([1] * len(logprobs)), logprobs=floats(logprobs))


def three_for_the_first(node: Node) -> int:
    return 3 if node.depth == 0 else 0


def test_a_fixed_fan_out_ends_at_its_depth() -> None:
    policy = FixedFanOut(width=3, depth=2)
    assert [len(policy.labels(Node(depth, 0, ()))) for depth in range(4)] == [3, 3, 1, 1]


@given(SMALL, SMALL, SMALL, SMALL, st.integers())
def test_a_random_expansion_starts_as_many_branches_as_it_says(
    chains: int, nodes: int, rounds: int, depth: int, seed: int
) -> None:
    rules = RandomExpansion(chains, nodes, rounds, depth)
    plan = expansion_plan(rules, (seed,))
    started = Counter(label for labels in plan.values() for label in labels)
    assert set(started.values()) <= {1}
    assert len(started) == chains * nodes * rounds
    assert all(0 <= at < depth for _, at in plan)
    known = {TRUNK, *range(chains)}
    while plan:  # every branch starts on one that exists
        reached = {place for place in plan if place[0] in known}
        assert reached
        known |= {label for place in reached for label in plan[place]}
        plan = {place: labels for place, labels in plan.items() if place not in reached}


def test_a_random_expansion_is_the_same_for_the_same_rollout_only() -> None:
    rules = RandomExpansion(2, 4, 2, 6)
    plans = {str(expansion_plan(rules, ("run", member))) for member in range(20)}
    assert len(plans) > 15
    assert expansion_plan(rules, ("run", 3)) == expansion_plan.__wrapped__(rules, ("run", 3))


def test_the_unsure_get_more_answers() -> None:
    policy = Uncertainty(width=3, depth=9, threshold=1.0, change=0.5)

    def answers(turn: Turn | None, before: Turn | None = None) -> int:
        return len(policy.labels(Node(1, 0, (), turn, before)))

    assert answers(sampled(-1.5, -0.7)) == 3
    assert answers(sampled(-0.2, -0.1)) == 1
    assert answers(sampled(-0.9), sampled(-0.1)) == 3
    assert answers(sampled(-0.5), sampled(-0.4)) == 1
    assert len(policy.labels(Node(0, TRUNK, ()))) == 3
    assert len(policy.labels(Node(9, 0, (), sampled(-5.0)))) == 1


def test_a_function_of_ones_own_decides_within_the_width() -> None:
    policy = OwnBranching(f"{__name__}:three_for_the_first", width=2)
    object.__setattr__(policy, "function", three_for_the_first)
    assert len(policy.labels(Node(0, TRUNK, ()))) == 2
    assert len(policy.labels(Node(1, 0, ()))) == 1


@pytest.mark.parametrize("name", ["nothing", "rollwright.errors:nothing", "no.such.module:f"])
def test_a_function_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.branch"):
        OwnBranching(name, width=2)


@given(st.lists(SMALL, min_size=1, max_size=12), st.integers(1, 20))
def test_a_budget_in_leaves_is_never_exceeded_by_more_than_what_was_there(
    wanted: list[int], limit: int
) -> None:
    budget = Budget(limit, BudgetUnit.LEAVES)
    given_so_far = 0
    for place, wants in enumerate(wanted):
        waiting = len(wanted) - place
        got = budget.grant(wants, leaves=given_so_far + waiting, unserved=given_so_far + waiting)
        assert 1 <= got <= wants
        given_so_far += got
    assert given_so_far <= max(limit, len(wanted))
    assert budget.refused == sum(wanted) - given_so_far


@given(st.lists(SMALL, min_size=1, max_size=8), st.integers(1, 40))
def test_a_budget_in_turns_keeps_room_for_every_question(wanted: list[int], limit: int) -> None:
    budget = Budget(limit, BudgetUnit.TURNS)
    budget.spend(turns=3)
    given_so_far = 0
    for place, wants in enumerate(wanted):
        waiting = len(wanted) - place
        given_so_far += budget.grant(wants, leaves=0, unserved=given_so_far + waiting)
    assert 3 + given_so_far <= max(limit, 3 + len(wanted))


def test_a_budget_in_tokens_counts_what_an_answer_costs_on_average() -> None:
    budget = Budget(100, BudgetUnit.TOKENS)
    budget.spend(tokens=40, turns=4)
    assert budget.grant(9, leaves=0, unserved=1) == 6
    budget.spend(tokens=70, turns=6)
    assert budget.grant(9, leaves=0, unserved=1) == 1
