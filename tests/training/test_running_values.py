"""Baselines that earlier batches give: exact by hand, unbiased, and the same after a resume."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rollwright.errors import ConfigError
from rollwright.training.advantages import RLOO, Remembering, TurnTree, make_advantage
from rollwright.trajectory import Boundary, ErrorRecord, Trajectory

Make = Callable[..., Trajectory]
FAILURE = ErrorRecord(boundary=Boundary.ENGINE, kind="timeout", message="", turn=0)


def test_rloo_compares_with_the_others_and_with_the_running_value(chain: Make) -> None:
    credit = RLOO(kappa=2, decay=0.5)
    first = [chain("a", [1.0]), chain("b", [0.0])]
    assert credit([first]) == [[[1.0], [-1.0]]], "nothing was seen before the first batch"
    credit.observe([first])
    credit.observe([[chain("c", [1.0]), chain("d", [1.0])]])
    value = (0.5 * 0.5 + 1.0) / 1.5
    [[one], [other]] = credit([[chain("e", [0.0]), chain("f", [0.5])]])[0]
    assert one == pytest.approx(0.0 - (0.5 + 2 * value) / 3)
    assert other == pytest.approx(0.5 - (0.0 + 2 * value) / 3)


def test_a_group_whose_members_all_fail_has_a_signal_where_the_tag_is_known_to_be_solvable(
    chain: Make,
) -> None:
    credit = RLOO(kappa=2)
    failed = [chain("a", [0.0]), chain("b", [0.0])]
    assert credit([failed]) == RLOO()([failed]) == [[[0.0], [0.0]]]
    credit.observe([[chain("c", [1.0])]])
    assert credit([failed]) == [[[-2 / 3], [-2 / 3]]]


def test_a_rollout_alone_is_compared_with_the_running_value(chain: Make) -> None:
    credit = RLOO(kappa=0.5)
    credit.observe([[chain("c", [1.0])]])
    assert credit([[chain("a", [0.25])]]) == [[[-0.75]]]


def test_a_group_of_chains_gives_a_tree_the_numbers_of_rloo(chain: Make) -> None:
    chains, tree = RLOO(kappa=2), TurnTree(kappa=2)
    for credit in (chains, tree):
        credit.observe([[chain("c", [1.0]), chain("d", [0.0])]])
    group = [chain("a", [0.0, 1.0]), chain("b", [0.5]), chain("e", [0.0])]
    assert tree([group])[0] == [pytest.approx(each) for each in chains([group])[0]]


@pytest.mark.parametrize("kappa", [0.0, 0.5, 2.0])
def test_rloo_with_a_running_value_is_unbiased(chain: Make, kappa: float) -> None:
    """All groups of three with success probability 0.3, counted by their probability; the gradient is 0.3 * 0.7."""
    credit = RLOO(kappa=kappa)
    credit.observe([[chain("x", [0.9])]])
    total = 0.0
    for rewards in product((0.0, 1.0), repeat=3):
        chance = 1.0
        for reward in rewards:
            chance *= 0.3 if reward else 0.7
        group = [chain(f"r{number}", [reward]) for number, reward in enumerate(rewards)]
        advantages = credit([group])[0]
        total += chance * sum(own[0] * (r - 0.3) for own, r in zip(advantages, rewards, strict=True)) / 3
    assert total == pytest.approx(0.3 * 0.7, abs=1e-12)


def test_levels_have_values_of_their_own_and_failures_count_in_none(chain: Make) -> None:
    credit = RLOO(kappa=1)
    easy, hard = chain("a", [1.0], tag="Lake@0"), chain("b", [0.0], tag="Lake@3")
    credit.observe([[easy], [hard], [chain("c", [0.5], tag="Lake@0", error=FAILURE)]])
    assert credit.prior("Lake@0") == 1.0
    assert credit.prior("Lake@3") == 0.0
    assert credit.prior("Lake@1") is None


def test_a_wrong_kappa_or_decay_is_refused_in_one_line() -> None:
    for option, value in (("kappa", -1.0), ("kappa", float("nan")), ("decay", 1.0)):
        with pytest.raises(ConfigError, match=f"advantage rloo: {option}: is .*; accepted: 0 or more"):
            make_advantage("rloo", **{option: value})


class _Counting(RLOO):
    """A user's own advantage with a memory."""


def test_a_memory_of_ones_own_is_kept_too(chain: Make) -> None:
    credit = make_advantage(f"{__name__}:_Counting", kappa=1.0)
    assert isinstance(credit, Remembering)
    credit.observe([[chain("a", [0.5])]])
    again = make_advantage(f"{__name__}:_Counting", kappa=1.0)
    assert isinstance(again, Remembering)
    again.restore(json.loads(json.dumps(credit.state())))
    assert again([[chain("b", [0.0])]]) == credit([[chain("b", [0.0])]]) == [[[-0.5]]]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import tiny_training

    yield tiny_training
    sys.modules.pop("tiny_training")


async def test_an_interrupted_run_goes_on_with_the_same_running_values_to_the_same_weights(
    tiny: Any, tmp_path: Path
) -> None:
    """It is stopped behind a checkpoint, so that the values come from it and from the record since."""
    model = Path(tiny.save_model(tmp_path / "model"))
    advantage = "training.advantage={name: rloo, options: {kappa: 2}}"
    config = tiny.configuration(model, advantage, "training.checkpoint_steps=2", max_steps=8)
    whole = await tiny.train(tmp_path / "whole", config, model)
    plain = await tiny.train(
        tmp_path / "plain", tiny.configuration(model, "training.advantage=rloo", max_steps=8), model
    )
    assert whole.checksum != plain.checksum
    task = asyncio.create_task(tiny.train(tmp_path / "runs", config, model))
    record = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    while not record.is_file() or record.read_text(encoding="utf-8").count("\n") < 5:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = await tiny.train(tmp_path / "runs", config, model)
    assert again.checksum == whole.checksum
