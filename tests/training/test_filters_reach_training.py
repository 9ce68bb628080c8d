"""What filters take out is out of the rows and, where they say so, out of every advantage's statistics."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rollwright.aio import run_virtual
from rollwright.config import build
from rollwright.rollout.filters import (
    Action,
    Catches,
    Duplicate,
    Filter,
    Overlong,
    VoidTurn,
    WrongFormat,
    judge,
    judge_group,
)
from rollwright.rollout.filters.settings import OverlongConfig
from rollwright.run.run import Run
from rollwright.simulation.players import RandomPlayer
from rollwright.training.advantages import ADVANTAGES, Advantage, left_out, make_advantage
from rollwright.training.rows import Row, build_rows
from rollwright.trajectory import Trajectory

Make = Callable[..., Trajectory]
BY_TOKEN = ("reinforce_plus_plus_tokens", "gae")
"""Their statistics are over trained tokens, as verl's are, so what is masked changes them: test_token_advantages.py."""
ALL = [pytest.param(make_advantage(name), id=name) for name in ADVANTAGES.kinds if name not in BY_TOKEN]
VIEWS: Any = ["paths", "turns"]


def with_outcome(trajectory: Trajectory, place: int, **fields: Any) -> Trajectory:
    turns = list(trajectory.turns)
    outcome = turns[place].outcome
    assert outcome is not None
    turns[place] = msgspec.structs.replace(
        turns[place], outcome=msgspec.structs.replace(outcome, action=None, **fields)
    )
    return msgspec.structs.replace(trajectory, turns=turns)


def acting(trajectory: Trajectory) -> Trajectory:
    """With an action in every turn."""
    turns = [
        msgspec.structs.replace(turn, outcome=msgspec.structs.replace(turn.outcome, action="go"))
        for turn in trajectory.turns
        if turn.outcome is not None
    ]
    return msgspec.structs.replace(trajectory, turns=turns)


def trained(rows: list[Row]) -> dict[str, int]:
    """Tokens that count in the loss, by rollout."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.rollout_id] = found.get(row.rollout_id, 0) + sum(row.mask)
        assert not any(
            value or weight
            for counts, value, weight in zip(row.mask, row.advantages, row.weights, strict=True)
            if not counts
        )
    return found


def sampled(trajectory: Trajectory) -> int:
    return sum(len(turn.sampled_ids) for turn in trajectory.turns)


@pytest.fixture
def group(chain: Make) -> list[Trajectory]:
    rewards = ([0.0, 1.0], [0.0, 0.0], [0.5, 0.0])
    return [acting(chain(name, own)) for name, own in zip("abc", rewards, strict=True)]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("advantage", ALL)
def test_a_masked_turn_has_no_loss_and_changes_nobodys_advantage(
    advantage: Advantage, view: Any, group: list[Trajectory]
) -> None:
    void = with_outcome(group[1], 0)
    judged = judge([Filter(VoidTurn(), Action.MASK)], void, Catches()).trajectory
    groups = [[group[0], judged, group[2]]]
    assert advantage(groups) == advantage([[group[0], void, group[2]]])
    found = trained(build_rows(groups, advantage, view=view))
    assert found == {
        "a": sampled(group[0]),
        "b": len(group[1].turns[1].sampled_ids),
        "c": sampled(group[2]),
    }


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("advantage", ALL)
def test_a_masked_trajectory_in_the_baseline_is_compared_with_and_not_trained(
    advantage: Advantage, view: Any, group: list[Trajectory]
) -> None:
    masked = judge([Filter(VoidTurn(), Action.STOP)], with_outcome(group[1], 1), Catches()).trajectory
    groups = [[group[0], masked, group[2]]]
    whole = advantage([group])[0]
    assert [advantage(groups)[0][place] for place in (0, 2)] == [whole[0], whole[2]]
    assert set(trained(build_rows(groups, advantage, view=view))) == {"a", "c"}
    assert left_out(groups) == {}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("advantage", ALL)
def test_out_of_the_baseline_is_as_if_it_had_not_been_played(
    advantage: Advantage, view: Any, group: list[Trajectory]
) -> None:
    each = Filter(VoidTurn(), Action.STOP, baseline=False)
    masked = judge([each], with_outcome(group[1], 1), Catches()).trajectory
    groups, without = [[group[0], masked, group[2]]], [[group[0], group[2]]]
    found = advantage(groups)[0]
    assert [found[0], found[2]] == advantage(without)[0]
    assert found[1] == [0.0, 0.0]
    assert build_rows(groups, advantage, view=view) == build_rows(without, advantage, view=view)
    assert left_out(groups) == {"filter void_turn": 1}


@pytest.mark.parametrize("advantage", ALL)
def test_a_soft_penalty_is_added_to_the_last_turns_advantage(
    advantage: Advantage, group: list[Trajectory]
) -> None:
    each = Filter(Overlong(OverlongConfig(kind="overlong", limit=1, slack=1, cost=0.25)), Action.PENALISE)
    judged = judge([each], group[1], Catches()).trajectory
    before, after = advantage([group])[0], advantage([[group[0], judged, group[2]]])[0]
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] == pytest.approx([before[1][0], before[1][1] - 0.25])


@pytest.mark.parametrize("view", VIEWS)
def test_filters_reach_advantages_over_tokens(view: Any, group: list[Trajectory]) -> None:
    """Without whitening each trajectory stands alone: what is out is as if it had not been played, a penalty is added."""
    advantage = make_advantage("gae", whiten=False)
    out = Filter(VoidTurn(), Action.STOP, baseline=False)
    masked = judge([out], with_outcome(group[1], 1), Catches()).trajectory
    groups, without = [[group[0], masked, group[2]]], [[group[0], group[2]]]
    assert build_rows(groups, advantage, view=view) == build_rows(without, advantage, view=view)
    late = Filter(Overlong(OverlongConfig(kind="overlong", limit=1, slack=1, cost=0.25)), Action.PENALISE)
    judged = judge([late], group[1], Catches()).trajectory
    before: Any = advantage([group])[0]
    after: Any = advantage([[group[0], judged, group[2]]])[0]
    assert (after[0], after[2], after[1][0]) == (before[0], before[2], before[1][0])
    assert after[1][1] == pytest.approx([each - 0.25 for each in before[1][1]])


def test_a_counted_member_is_trained_as_if_nobody_had_looked(group: list[Trajectory]) -> None:
    twin = msgspec.structs.replace(group[0], rollout_id="d")
    four = [*group, twin]
    counted, _ = judge_group([Filter(Duplicate(), Action.COUNT)], four, Catches())
    masked, _ = judge_group([Filter(Duplicate(), Action.MASK, baseline=False)], four, Catches())
    advantage = make_advantage("rloo")
    assert build_rows([counted], advantage) == build_rows([four], advantage)
    assert build_rows([masked], advantage) == build_rows([group], advantage)


@pytest.mark.parametrize("baseline", [True, False])
def test_the_rows_of_a_run_are_what_its_filters_left(baseline: bool) -> None:
    """A random player on a game in which many answers are refused."""
    filters = [
        {"kind": "format_error", "action": "mask"},
        {"kind": "overlong", "action": "mask", "limit": 60, "baseline": baseline},
    ]
    manager = {"num_env_groups": 4, "group_size": 4, "tags": ["FrozenLake"], "filters": filters}
    config = build({"train_env_manager": manager})

    async def run() -> list[list[Trajectory]]:
        async with Run(config, policy=RandomPlayer()) as run:
            return [group.trajectories for group in (await run.get_batch()).groups]

    groups = run_virtual(run())
    played = [each for group in groups for each in group]
    cut = [each for each in played if each.filtered == "overlong"]
    assert 0 < len(cut) < len(played)
    expected = {
        each.rollout_id: sum(
            len(turn.sampled_ids) for turn in each.turns if not WrongFormat().catches_turn(turn)
        )
        for each in played
        if each not in cut
    }
    found = trained(build_rows(groups, make_advantage("grpo")))
    assert found == {name: tokens for name, tokens in expected.items() if tokens}
    assert left_out(groups) == ({} if baseline else {"filter overlong": len(cut)})
