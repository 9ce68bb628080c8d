"""Advantages of single tokens, against verl's own functions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from rollwright.errors import RollwrightError
from rollwright.training.advantages import Advantage, ReinforcePlusPlusTokens, TokenGAE, make_advantage
from rollwright.training.advantages.base import NamedAdvantage
from rollwright.training.rows import View, build_rows
from rollwright.trajectory import (
    Boundary,
    ErrorRecord,
    Outcome,
    Trajectory,
    Turn,
    VersionRun,
    floats,
    token_ids,
)

Make = Callable[..., Trajectory]

PEERS = dict(numpy.load(Path(__file__).parent / "data" / "peer_losses.npz"))
"""Recorded values of verl's own functions; `bench/losses_peers.py` draws them."""


def chains_of(number: int) -> list[list[Trajectory]]:
    """A recorded batch as groups of two chains: each run of the mask is a turn, with its reward at the last token."""
    found = []
    for row, (mask, rewards) in enumerate(
        zip(PEERS["mask"][number] > 0, PEERS["advantage turn_rewards"][number], strict=True)
    ):
        ends = [place for place, counts in enumerate(mask) if counts and not [*mask, False][place + 1]]
        starts = [place for place, counts in enumerate(mask) if counts and not (place and mask[place - 1])]
        turns = [
            Turn(
                id=place,
                after=place - 1 if place else None,
                extends=place - 1 if place else None,
                prompt_ids=token_ids([1]),
                sampled_ids=token_ids([1] * (end - start + 1)),
                logprobs=floats([0.0] * (end - start + 1)),
                versions=(VersionRun(0, end - start + 1),),
                outcome=Outcome(observation="", reward=float(rewards[end])),
            )
            for place, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        found.append(Trajectory(f"r{row}", "a", f"g{row // 2}", "T", seed=1, turns=turns))
    return [found[:2], found[2:]]


@pytest.mark.parametrize(
    ("recorded", "options"),
    [
        ("reinforce_plus_plus 1.0", {}),
        ("reinforce_plus_plus 0.9", {"discount": 0.9}),
        ("reinforce_plus_plus_baseline", {"group_baseline": True}),
    ],
)
def test_reinforce_plus_plus_over_tokens_equals_verls(recorded: str, options: dict[str, Any]) -> None:
    for number, mask in enumerate(PEERS["mask"] > 0):
        found = make_advantage("reinforce_plus_plus_tokens", **options)(chains_of(number))
        flat = [each for group in found for own in group for turn in own for each in turn]
        assert flat == pytest.approx(PEERS[f"advantage {recorded}"][number][mask].tolist(), abs=1e-6)


@pytest.mark.parametrize("view", ["paths", "turns"])
def test_rows_carry_an_advantage_for_each_token_in_either_view(chain: Make, view: View) -> None:
    groups = [[chain("a", [0.0, 1.0]), chain("b", [0.5, 0.0])]]
    estimator = ReinforcePlusPlusTokens(discount=0.5)
    expected = [each for own in estimator(groups)[0] for turn in own for each in turn]
    rows = build_rows(groups, estimator, view=view)
    found = [each for row in rows for each, counts in zip(row.advantages, row.mask, strict=True) if counts]
    assert found == pytest.approx(expected)
    assert len(set(expected)) > 4


@pytest.mark.parametrize("estimator", [ReinforcePlusPlusTokens(), TokenGAE()])
def test_failures_and_second_copies_enter_no_statistics_of_tokens(chain: Make, estimator: Advantage) -> None:
    pair = [chain("a", [1.0, 0.0]), chain("b", [0.0, 0.5])]
    failed = chain(
        "c", [9.0, 9.0], error=ErrorRecord(boundary=Boundary.ENGINE, kind="timeout", message="", turn=0)
    )
    found = estimator([[pair[0], failed, pair[1], pair[0]]])[0]
    assert [found[0], found[2]] == estimator([pair])[0]
    assert {each for own in (found[1], found[3]) for turn in own for each in turn} == {0.0}


@pytest.mark.parametrize("estimator", [ReinforcePlusPlusTokens(), TokenGAE()])
def test_a_penalty_is_added_to_the_tokens_of_the_guilty_turn(chain: Make, estimator: Advantage) -> None:
    guilty = [chain("a", [1.0, 0.0], penalties=[0.0, -0.25]), chain("b", [0.0, 0.5])]
    innocent = [chain("a", [1.0, 0.0]), chain("b", [0.0, 0.5])]
    found, plain = estimator([guilty])[0], estimator([innocent])[0]
    assert found[0][0] == plain[0][0]
    assert found[0][1] == pytest.approx([each - 0.25 for each in plain[0][1]])
    assert found[1] == plain[1]


def test_an_advantage_of_ones_own_may_give_one_for_each_token(chain: Make) -> None:
    groups = [[chain("a", [1.0, 0.0])]]
    tokens = [[[[0.5] * len(turn.sampled_ids) for turn in groups[0][0].turns]]]
    assert NamedAdvantage("mine:tokens", lambda groups: tokens)(groups) == tokens
    tokens[0][0][1].append(0.5)
    with pytest.raises(RollwrightError, match=r"advantage mine:tokens: .*no number for each turn"):
        NamedAdvantage("mine:tokens", lambda groups: tokens)(groups)
