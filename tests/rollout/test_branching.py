"""How many answers a question gets is fixed beforehand, and never more than the budget allows."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.rollout.branching import (
    TRUNK,
    FixedFanOut,
    KeepAlive,
    Node,
    OwnBranching,
    Split,
    Uncertainty,
    expansion_plan,
    make_branching,
)
from rollwright.rollout.settings.strategies import (
    BRANCH_POLICIES,
    KeepAliveBranchConfig,
    OwnBranchConfig,
    RandomBranchConfig,
    SplitBranchConfig,
    TreeStrategyConfig,
    UncertaintyBranchConfig,
)
from rollwright.rollout.tree import Budget, BudgetUnit
from rollwright.trajectory import Turn, floats, token_ids

SMALL = st.integers(1, 4)


def sampled(*logprobs: float) -> Turn:
    return Turn(0, None, None, sampled_ids=token_ids([1] * len(logprobs)), logprobs=floats(logprobs))


def own(name: str) -> OwnBranching:
    return OwnBranching(2, 9, OwnBranchConfig(kind="own", function=name))


def three_for_the_first(node: Node) -> int:
    return 3 if node.depth == 0 else 0


def test_a_fixed_fan_out_ends_at_its_depth() -> None:
    policy = FixedFanOut(width=3, depth=2)
    assert [len(policy.labels(Node(depth, 0, ()))) for depth in range(4)] == [3, 3, 1, 1]


@given(SMALL, SMALL, SMALL, SMALL, st.integers())
def test_a_random_expansion_starts_as_many_branches_as_it_says(
    chains: int, nodes: int, rounds: int, depth: int, seed: int
) -> None:
    rules = RandomBranchConfig(kind="random", chains=chains, nodes=nodes, rounds=rounds)
    plan = expansion_plan(rules, depth, (seed,))
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
    rules = RandomBranchConfig(kind="random", chains=2, nodes=4, rounds=2)
    plans = {str(expansion_plan(rules, 6, ("run", member))) for member in range(20)}
    assert len(plans) > 15
    assert expansion_plan(rules, 6, ("run", 3)) == expansion_plan.__wrapped__(rules, 6, ("run", 3))


def test_the_unsure_get_more_answers() -> None:
    policy = Uncertainty(3, 9, UncertaintyBranchConfig(kind="uncertainty", threshold=1.0, change=0.5))

    def answers(turn: Turn | None, before: Turn | None = None) -> int:
        return len(policy.labels(Node(1, 0, (), turn, before)))

    assert answers(sampled(-1.5, -0.7)) == 3
    assert answers(sampled(-0.2, -0.1)) == 1
    assert answers(sampled(-0.9), sampled(-0.1)) == 3
    assert answers(sampled(-0.5), sampled(-0.4)) == 1
    assert len(policy.labels(Node(0, TRUNK, ()))) == 3
    assert len(policy.labels(Node(9, 0, (), sampled(-5.0)))) == 1


def test_the_entropy_of_the_question_counts_before_the_turn_in_front_of_it() -> None:
    policy = Uncertainty(3, 9, UncertaintyBranchConfig(kind="uncertainty", threshold=1.0, change=0.5))

    def answers(entropy: float, before: float | None = None) -> int:
        turn = msgspec.structs.replace(sampled(-5.0), entropy=before)
        return len(policy.labels(Node(1, 0, (), turn, sampled(-0.1), entropy)))

    assert answers(1.2) == 3
    assert answers(0.1) == 1
    assert answers(0.8, before=0.1) == 3
    assert answers(0.8, before=0.6) == 1
    assert len(policy.labels(Node(0, TRUNK, (), entropy=0.1))) == 1


def test_an_entropy_is_asked_for_only_where_a_question_may_branch() -> None:
    asked = UncertaintyBranchConfig(kind="uncertainty")
    assert [Uncertainty(2, 2, asked).asks_entropy(depth) for depth in range(3)] == [True, True, False]
    assert not Uncertainty(1, 2, asked).asks_entropy(0)
    assert not Uncertainty(2, 2, asked.model_copy(update={"of": "turn"})).asks_entropy(0)


def test_a_function_of_ones_own_decides_within_the_width() -> None:
    policy = own(f"{__name__}:three_for_the_first")
    assert [len(each) for each in policy.level([Node(0, TRUNK, ())])] == [2]
    assert [len(each) for each in policy.level([Node(1, 0, ()), Node(1, 0, ())])] == [1, 1]


def two_where_few_live(node: Node, live: Sequence[Node]) -> int:
    return 2 if len(live) < 3 else 1


def test_a_function_of_ones_own_may_look_at_the_whole_level() -> None:
    policy = own(f"{__name__}:two_where_few_live")
    node = Node(1, 0, ())
    assert [len(each) for each in policy.level([node] * 2)] == [2, 2]
    assert [len(each) for each in policy.level([node] * 3)] == [1, 1, 1]


def test_a_split_has_many_roots_and_branches_once() -> None:
    policy = Split(4, 9, SplitBranchConfig(kind="split", roots=8, at=2))
    assert [len(policy.labels(Node(depth, 0, ()))) for depth in range(5)] == [8, 1, 4, 1, 1]
    early = Split(3, 9, SplitBranchConfig(kind="split", roots=2, at=0))
    assert len(early.labels(Node(0, TRUNK, ()))) == 6


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 8), st.integers(1, 9))
def test_the_live_population_is_refilled_and_never_thinned(
    living: int, alive: int, width: int, depth: int
) -> None:
    policy = KeepAlive(width, 5, KeepAliveBranchConfig(kind="keep_alive", alive=alive))
    counts = [len(each) for each in policy.level([Node(depth, 0, ("run", 1))] * living)]
    assert len(counts) == living
    assert all(1 <= count <= width for count in counts)
    if depth >= 5:
        assert sum(counts) == living
    else:
        assert sum(counts) == min(max(alive, living), width * living)
        assert max(counts) - min(counts) <= 1
    assert [len(each) for each in policy.level([Node(0, TRUNK, ("run", 1))])] == [width]


def test_who_of_the_living_gets_one_more_is_drawn_for_each_tree_and_level() -> None:
    policy = KeepAlive(4, 9, KeepAliveBranchConfig(kind="keep_alive", alive=5))
    seen = {
        tuple(len(each) for each in policy.level([Node(depth, 0, ("run", tree))] * 4))
        for tree in range(10)
        for depth in (1, 2)
    }
    assert len(seen) == 4


def test_every_kind_is_made_of_its_settings() -> None:
    for kind in BRANCH_POLICIES.kinds:
        strategy = TreeStrategyConfig(kind="tree", width=3, depth=4, branch={"kind": kind})
        made = make_branching(strategy.branch, strategy.width, strategy.depth)
        assert made.rules is strategy.branch
        assert (made.width, made.depth) == (3, 4)


@pytest.mark.parametrize("name", ["nothing", "rollwright.errors:nothing", "no.such.module:f"])
def test_a_function_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.branch"):
        own(name)


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
