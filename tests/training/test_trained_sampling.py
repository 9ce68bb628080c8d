"""The trainer computes at the temperature that a token was drawn at, and refuses what it does not compute."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from rollwright.training.advantages import GRPO, left_out
from rollwright.training.bridges import completion_of
from rollwright.training.rows import NotTrainable, Row, build_rows, untrained_turns
from rollwright.training.settings import LossSettings, TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import SamplingParams, Trajectory, floats

Chain = Callable[..., Trajectory]


def drawn(trajectory: Trajectory, *samplings: SamplingParams | None, own: SamplingParams) -> Trajectory:
    turns = [
        msgspec.structs.replace(turn, sampling=each)
        for turn, each in zip(trajectory.turns, samplings, strict=True)
    ]
    return msgspec.structs.replace(trajectory, turns=turns, sampling=own)


COOL, HOT = SamplingParams(temperature=0.5), SamplingParams(temperature=1.7)


def mixed(chain: Chain) -> list[list[Trajectory]]:
    """Two rollouts, each with turns at two temperatures."""
    return [
        [
            drawn(chain("r1", [0.0, 1.0]), None, HOT, own=COOL),
            drawn(chain("r2", [0.0, 0.0]), COOL, None, own=HOT),
        ]
    ]


def own_logprobs(rows: Sequence[Row], model: Any) -> list[Row]:
    """What an engine that samples each token at its own temperature would have told."""
    import torch

    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([list(row.token_ids)])
            logits = model(input_ids=ids).logits[0]
            told = [0.0]
            for place, each in enumerate(ids[0, 1:].tolist()):
                assert row.temperatures is not None
                heat = row.temperatures[place + 1]
                told.append(float(torch.log_softmax(logits[place] / (heat if heat > 0 else 1), -1)[each]))
            masked = floats(each if counts else 0.0 for each, counts in zip(told, row.mask, strict=True))
            found.append(msgspec.structs.replace(row, logprobs=masked))
    return found


def test_each_token_is_computed_at_the_temperature_that_it_was_drawn_at(chain: Chain, model: Any) -> None:
    rows = own_logprobs(build_rows(mixed(chain), GRPO()), model)
    settings = TrainerSettings(learning_rate=0.0, loss=LossSettings(kl_coefficient=0.1))
    report = Trainer(model, settings).step(rows)
    assert report.skipped is None
    assert report.gap_max is not None
    assert report.gap_max < 1e-4
    assert report.ratio == pytest.approx(1.0, abs=1e-4)
    assert report.divergence == pytest.approx(0.0, abs=1e-6)
    blind = [msgspec.structs.replace(row, temperatures=None) for row in rows]
    other = Trainer(model, settings).step(blind)
    assert other.gap_max is not None
    assert other.gap_max > 0.05


def test_rows_without_a_recorded_temperature_have_the_trainers_own(
    chain: Chain, model: Any, scored: Any
) -> None:
    groups = [[chain("r1", [1.0]), chain("r2", [0.0])]]
    rows = scored(build_rows(groups, GRPO()), model, temperature=0.6)
    assert all(row.temperatures is None for row in rows)
    report = Trainer(model, TrainerSettings(), temperature=0.6).step(rows)
    assert report.gap_max is not None
    assert report.gap_max < 1e-4


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (SamplingParams(temperature=0.0), "sampled at temperature 0"),
        (SamplingParams(temperature=0.001), "sampled at temperature 0.001"),
        (SamplingParams(top_p=0.9), "sampled with top_p 0.9"),
        (SamplingParams(top_k=40), "sampled with top_k 40"),
        (SamplingParams(min_p=0.05), "sampled with min_p 0.05"),
        (SamplingParams(repetition_penalty=1.1), "sampled with repetition_penalty 1.1"),
        (SamplingParams(presence_penalty=0.5), "sampled with presence_penalty 0.5"),
        (SamplingParams(other=("logit_bias",)), "sampled with logit_bias"),
        (SamplingParams(temperature=float("nan")), "sampled at temperature nan"),
    ],
)
def test_a_rollout_of_another_distribution_is_refused_in_one_line(
    chain: Chain, own: SamplingParams, why: str
) -> None:
    greedy = drawn(chain("r1", [1.0]), None, own=own)
    with pytest.raises(
        NotTrainable, match=f"rollout r1 is not trainable: it was {why}; only the temperature"
    ):
        build_rows([[greedy, chain("r2", [0.0])]], GRPO())
    with pytest.raises(NotTrainable, match=why):
        completion_of(greedy)


def test_single_turns_of_another_distribution_are_out_of_the_loss_and_counted(chain: Chain) -> None:
    greedy, cut = SamplingParams(temperature=0.0), SamplingParams(top_p=0.5)
    one = drawn(chain("r1", [0.0, 0.0, 1.0]), greedy, None, cut, own=SamplingParams())
    none = drawn(chain("r3", [1.0]), greedy, own=SamplingParams())
    groups = [[one, chain("r2", [0.0]), none]]
    (row,) = (row for row in build_rows(groups, GRPO()) if row.rollout_id == "r1")
    assert sum(row.mask) == len(one.turns[1].sampled_ids)
    assert untrained_turns(groups) == {
        "turns: sampled at temperature 0": 1,
        "turns: sampled with top_p 0.5": 1,
    }
    assert left_out(groups) == {"sampled at temperature 0": 1}
    told = completion_of(one)
    assert sum(told.mask) == len(one.turns[1].sampled_ids)
    assert told.temperatures == {1.0}
    assert sum(completion_of(one, own_sampling=True).mask) == one.sampled_tokens


@pytest.mark.parametrize("heat", [0.0, 0.001, float("inf"), float("nan")])
def test_the_trainer_refuses_a_row_of_a_temperature_that_it_does_not_model(
    chain: Chain, model: Any, heat: float
) -> None:
    rows = build_rows([[chain("r1", [1.0]), chain("r2", [0.0])]], GRPO())
    wrong = [msgspec.structs.replace(row, temperatures=floats([heat]) * len(row.mask)) for row in rows]
    with pytest.raises(NotTrainable, match=r"rollout r1 is not trainable: it was sampled at temperature"):
        Trainer(model, TrainerSettings()).step(wrong)


def test_the_lowest_temperature_is_modelled(chain: Chain, model: Any) -> None:
    lowest = SamplingParams(temperature=0.01)
    groups = [[drawn(chain("r1", [1.0]), None, own=lowest), drawn(chain("r2", [0.0]), None, own=lowest)]]
    rows = own_logprobs(build_rows(groups, GRPO()), model)
    assert Trainer(model, TrainerSettings()).step(rows).skipped is None
