"""Rows hold every sampled token once, with its turn's advantage."""

from collections.abc import Callable
from typing import Literal

import msgspec
import pytest

from rollwright.training.advantages import RLOO, TurnTree
from rollwright.training.rows import NotTrainable, build_rows
from rollwright.trajectory import Boundary, ErrorRecord, Trajectory, Turn, token_ids

Make = Callable[..., Trajectory]
View = Literal["paths", "turns"]


def replaced(trajectory: Trajectory, turn: int, **changes: object) -> Trajectory:
    turns: list[Turn] = list(trajectory.turns)
    turns[turn] = msgspec.structs.replace(turns[turn], **changes)
    return msgspec.structs.replace(trajectory, turns=turns)


@pytest.mark.parametrize("view", ["paths", "turns"])
def test_every_sampled_token_is_trained_once_with_its_turns_advantage_and_weight(
    forest: Make, view: View
) -> None:
    tree = forest("a", [(None, 0.0), (0, 1.0), (0, 0.0)])
    groups = [[tree, forest("b", [(None, 0.0)])]]
    rows = build_rows(groups, TurnTree(), view=view)
    advantages = TurnTree()(groups)[0][0]
    trained = [
        (token, row.advantages[place], row.weights[place], row.logprobs[place])
        for row in rows
        if row.rollout_id == "a"
        for place, token in enumerate(row.token_ids)
        if row.mask[place]
    ]
    expected = [
        (token, advantages[turn.id], 1.0 if turn.id == 0 else 0.5, turn.logprobs[place])
        for turn in tree.turns
        for place, token in enumerate(turn.sampled_ids)
    ]
    assert sorted(trained) == sorted(expected)  # halves are exact in 32 bits
    assert all(len(row.token_ids) == len(row.mask) == len(row.advantages) == len(row.weights) for row in rows)


def test_the_paths_of_a_chain_are_one_row_and_its_turns_many(chain: Make) -> None:
    groups = [[chain("a", [0.0, 1.0, 0.0]), chain("b", [0.0])]]
    assert len(build_rows(groups, RLOO())) == 2
    assert len(build_rows(groups, RLOO(), view="turns")) == 4


def test_a_row_says_what_its_rollout_came_to(chain: Make) -> None:
    rows = build_rows([[chain("a", [0.5, 1.0], success=True), chain("b", [0.0])]], RLOO(), view="turns")
    assert [(row.reward, row.success) for row in rows] == [(1.5, 1.0), (1.5, 1.0), (0.0, None)]


def test_failed_episodes_and_second_copies_give_no_row(chain: Make) -> None:
    failure = ErrorRecord(boundary=Boundary.TOOL, kind="x", message="", turn=0)
    one = chain("a", [1.0])
    rows = build_rows([[one, chain("b", [0.0], error=failure), one, chain("c", [0.0])]], RLOO())
    assert [row.rollout_id for row in rows] == ["a", "c"]


def test_ids_that_no_engine_sampled_are_refused_with_what_to_use(chain: Make) -> None:
    text = replaced(chain("a", [1.0]), 0, exact=False)
    with pytest.raises(
        NotTrainable, match=r"rollout a .* log-probabilities; use an engine that returns token ids"
    ):
        build_rows([[text, chain("b", [0.0])]], RLOO())


def test_a_sequence_that_begins_with_a_sample_is_refused(chain: Make) -> None:
    bare = replaced(chain("a", [1.0]), 0, prompt_ids=token_ids())
    with pytest.raises(NotTrainable, match="a prompt needs at least one token"):
        build_rows([[bare]], RLOO())
