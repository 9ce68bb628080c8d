"""Each advantage against numbers worked out by hand."""

from collections.abc import Callable
from math import sqrt

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.training.advantages import (
    ADVANTAGES,
    GAE,
    GRPO,
    RLOO,
    Advantage,
    AgentWise,
    DrGRPO,
    GiGPO,
    ReinforcePlusPlus,
    TurnTree,
    left_out,
    make_advantage,
)
from rollwright.training.advantages.tree import turn_values
from rollwright.trajectory import Boundary, ErrorRecord, Trajectory

Make = Callable[..., Trajectory]

OF_TURNS = [name for name in ADVANTAGES.kinds if name not in ("reinforce_plus_plus_tokens", "gae")]
"""Those of single tokens are in `test_token_advantages.py` and `test_critic.py`."""
ALL: list[Advantage] = [make_advantage(name) for name in OF_TURNS]
FAILURE = ErrorRecord(boundary=Boundary.ENGINE, kind="timeout", message="", turn=0)


def firsts(found: list[list[list[float]]]) -> list[list[float]]:
    """The first turn's advantage, by group and trajectory."""
    return [[turns[0] for turns in group] for group in found]


def about(values: object) -> object:
    return pytest.approx(values, abs=1e-5)


def test_grpo_is_the_distance_from_the_mean_in_standard_deviations(chain: Make) -> None:
    groups = [[chain("a", [0.0, 1.0]), chain("b", [0.0]), chain("c", [0.0]), chain("d", [0.0])]]
    found = GRPO()(groups)
    assert found[0][0] == about([1.5, 1.5])  # 0.75 / 0.5
    assert firsts(found)[0][1:] == about([-0.5, -0.5, -0.5])
    assert firsts(GRPO(std=False)(groups))[0] == about([0.75, -0.25, -0.25, -0.25])


def test_dr_grpo_is_the_distance_from_the_mean(chain: Make) -> None:
    groups = [[chain("a", [2.0]), chain("b", [0.0])], [chain("c", [5.0]), chain("d", [4.0])]]
    assert firsts(DrGRPO()(groups)) == [[1.0, -1.0], [0.5, -0.5]]


def test_rloo_is_the_distance_from_the_mean_of_the_others(chain: Make) -> None:
    groups = [[chain("a", [1.0]), chain("b", [0.0]), chain("c", [0.5])]]
    assert firsts(RLOO()(groups))[0] == about([0.75, -0.75, 0.0])


def test_reinforce_plus_plus_normalises_over_the_whole_batch(chain: Make) -> None:
    groups = [[chain("a", [1.0]), chain("b", [0.0])], [chain("c", [4.0]), chain("d", [3.0])]]
    spread = sqrt((1 + 4 + 4 + 1) / 3)
    first, second = firsts(ReinforcePlusPlus()(groups))
    assert first + second == about([-1 / spread, -2 / spread, 2 / spread, 1 / spread])
    first, second = firsts(ReinforcePlusPlus(group_baseline=True)(groups))
    half = 0.5 / sqrt(4 * 0.25 / 3)
    assert first + second == about([half, -half, half, -half])


def test_reinforce_plus_plus_counts_each_trajectory_once_whatever_its_length(chain: Make) -> None:
    short = [[chain("a", [1.0]), chain("b", [0.0])]]
    long = [[chain("a", [0.0] * 9 + [1.0]), chain("b", [0.0])]]
    assert firsts(ReinforcePlusPlus()(long))[0] == about(firsts(ReinforcePlusPlus()(short))[0])


def test_gae_follows_the_values_along_the_decisions(chain: Make) -> None:
    groups = [[chain("a", [1.0, 0.0, 2.0])]]
    # delta: 1 + 0.9*3 - 2 = 1.7; 0 + 0.9*1 - 3 = -2.1; 2 - 1 = 1
    found = GAE(values=lambda _: [2.0, 3.0, 1.0], discount=0.9, decay=0.5)(groups)
    assert found[0][0] == about([1.7 + 0.45 * (-2.1 + 0.45), -2.1 + 0.45, 1.0])


def test_gae_takes_the_mean_over_children(forest: Make) -> None:
    groups = [[forest("a", [(None, 0.0), (0, 1.0), (0, 3.0)])]]
    found = GAE(values=lambda _: [1.0, 0.0, 0.0], decay=1.0)(groups)
    assert found[0][0] == about([1.0, 1.0, 3.0])  # 0 + (1 + 3) / 2 - 1


def test_gae_without_a_value_for_each_turn_is_refused(chain: Make) -> None:
    with pytest.raises(ConfigError, match="1 values for the 2 turns of a"):
        GAE(values=lambda _: [1.0])([[chain("a", [0.0, 1.0])]])


def test_gigpo_adds_what_a_step_did_better_from_the_same_state(chain: Make) -> None:
    start = {"observation": "start"}
    won = chain("a", [0.0, 1.0], observations=["fork", "end"], **start)
    lost = chain("b", [0.0, 0.0], observations=["fork", "pit"], **start)
    other = chain("c", [0.0, 0.0], observations=["wall", "pit"], **start)
    found = GiGPO(discount=0.5)([[won, lost, other]])[0]
    # Episodes: 1 - 1/3, then -1/3. From `start`, returns 0.5, 0, 0; from `fork`, 1 and 0; from `wall`, one alone.
    assert found[0] == about([2 / 3 + 1 / 3, 2 / 3 + 0.5])
    assert found[1] == about([-1 / 3 - 1 / 6, -1 / 3 - 0.5])
    assert found[2] == about([-1 / 3 - 1 / 6, -1 / 3])


def test_gigpo_never_compares_states_of_different_groups(chain: Make) -> None:
    groups = [[chain("a", [1.0], observation="same")], [chain("b", [0.0], observation="same")]]
    assert GiGPO()(groups) == [[[0.0]], [[0.0]]]


@pytest.fixture
def team(chain: Make) -> list[Trajectory]:
    """Verifier, querier, answerer: two win, two lose, and they are called 1 to 3 times."""
    calls = {"a": ("VQVA", 1.0), "b": ("VA", 0.0), "c": ("VQVQVA", 0.0), "d": ("VA", 1.0)}
    return [
        chain(name, [0.0] * (len(agents) - 1) + [reward], agents=list(agents))
        for name, (agents, reward) in calls.items()
    ]


def test_agent_wise_compares_an_agent_with_its_own_calls(team: list[Trajectory]) -> None:
    won, lost, long, _ = AgentWise()([team])[0]
    # V: 1 1 0 0 0 0 1; Q: 1 0 0; A: 1 0 0 1
    spread = sqrt((3 * (4 / 7) ** 2 + 4 * (3 / 7) ** 2) / 6)
    verifier, querier, answerer = (4 / 7) / spread, (2 / 3) / sqrt(1 / 3), 0.5 / sqrt(1 / 3)
    assert won == about([verifier, querier, verifier, answerer])
    assert lost == about([-(3 / 7) / spread, -answerer])
    assert long[1] == about(-(1 / 3) / sqrt(1 / 3))


def test_agent_wise_can_count_every_trajectory_once(team: list[Trajectory]) -> None:
    won, lost, *_ = AgentWise(std=False, per="trajectory")([team])[0]
    assert won == about([0.5, 0.5, 0.5, 0.5])
    assert lost == about([-0.5, -0.5])


def test_a_tree_compares_siblings_and_lets_an_only_child_inherit(forest: Make) -> None:
    #      0          root, then two branches; the left one splits again below an only child
    #    1   2
    #    3
    #   4 5
    tree = forest("a", [(None, 0.0), (0, 0.0), (0, 2.0), (1, 0.0), (3, 1.0), (3, 0.0)])
    chain_ = forest("b", [(None, 0.25)])
    assert turn_values(tree) == [1.25, 0.5, 2.0, 0.5, 1.0, 0.0]
    found = TurnTree()([[tree, chain_]])[0]
    assert found[0] == about([1.0, -1.5, 1.5, -1.5, 1.0, -1.0])
    assert found[1] == about([-1.0])


def test_values_are_means_over_children_and_not_over_leaves(forest: Make) -> None:
    busy = forest("a", [(None, 0.0), (0, 0.0), (0, 0.0), (1, 1.0), (1, 1.0), (1, 1.0), (2, 0.0)])
    assert turn_values(busy)[0] == 0.5  # the leaves' mean is 0.75


def test_siblings_that_came_out_the_same_count_as_often_as_they_came(forest: Make) -> None:
    merged = forest("a", [(None, 0.0), (0, 1.0), (0, 0.0)], counts=[1, 3, 1])
    apart = forest("a", [(None, 0.0), (0, 1.0), (0, 1.0), (0, 1.0), (0, 0.0)])
    assert turn_values(merged)[0] == turn_values(apart)[0] == 0.75
    assert TurnTree()([[merged]])[0][0] == about([0.0, 1 / 3, -1.0])
    assert TurnTree()([[apart]])[0][0] == about([0.0, 1 / 3, 1 / 3, 1 / 3, -1.0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=1, max_size=6))
def test_a_group_of_chains_gives_exactly_rloo(chain: Make, rewards: list[list[float]]) -> None:
    group = [chain(str(place), own) for place, own in enumerate(rewards)]
    assert TurnTree()([group]) == RLOO()([group])


@pytest.mark.parametrize("advantage", ALL, ids=OF_TURNS)
def test_who_has_nobody_to_be_compared_with_gets_nothing(advantage: Advantage, chain: Make) -> None:
    assert advantage([[chain("a", [1.0, 3.0])]]) == [[[0.0, 0.0]]]


@pytest.mark.parametrize("advantage", ALL, ids=OF_TURNS)
def test_a_group_in_which_all_did_the_same_gets_nothing(advantage: Advantage, chain: Make) -> None:
    assert firsts(advantage([[chain(name, [0.1, 0.2]) for name in "abc"]])) == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("advantage", ALL, ids=OF_TURNS)
def test_a_penalty_is_added_after_normalising_on_the_guilty_turn(advantage: Advantage, chain: Make) -> None:
    clean = [chain("a", [0.0, 1.0], observations=["s", "t"]), chain("b", [0.0, 0.0], observations=["s", "t"])]
    guilty = chain("b", [0.0, 0.0], observations=["s", "t"], penalties=[0.0, -0.125])
    expected, found = advantage([clean])[0], advantage([[clean[0], guilty]])[0]
    assert found[0] == expected[0]
    assert found[1] == [expected[1][0], expected[1][1] - 0.125]


@pytest.mark.parametrize("advantage", ALL, ids=OF_TURNS)
def test_failures_and_second_copies_enter_no_statistics(advantage: Advantage, chain: Make) -> None:
    pair = [chain("a", [1.0, 0.0]), chain("b", [0.0, 0.0])]
    failed = chain("c", [9.0, 9.0], error=FAILURE)
    found = advantage([[pair[0], failed, pair[1], pair[0]]])[0]
    assert [found[0], found[2]] == advantage([pair])[0]
    assert found[1] == found[3] == [0.0, 0.0]


def test_what_is_left_out_is_counted_by_reason(chain: Make) -> None:
    once = chain("a", [1.0])
    groups = [[once, once], [chain("c", [9.0], error=FAILURE), chain("d", [], observation="")]]
    assert left_out(groups) == {
        "the same rollout a second time": 1,
        "engine failure: timeout": 1,
        "no token was sampled": 1,
    }


def test_a_rollout_whose_first_attempt_failed_counts_with_its_second(chain: Make) -> None:
    again = chain("a", [1.0])
    assert RLOO()([[chain("a", [0.0], error=FAILURE), again, chain("b", [0.0])]])[0] == [[0.0], [1.0], [-1.0]]


def test_an_unknown_advantage_or_option_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(ConfigError, match=r"unknown `gpro` .did you mean `grpo`.*; known: grpo"):
        make_advantage("gpro")
    with pytest.raises(
        ConfigError, match=r"advantage grpo: unknown setting 'sd' .did you mean 'std'.*; accepted: std"
    ):
        make_advantage("grpo", sd=True)
