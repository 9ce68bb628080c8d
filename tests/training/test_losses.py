"""Losses against numbers worked out by hand, and coefficients that no cut of the batch can change."""

from collections.abc import Callable
from math import log
from typing import Any

import pytest
import torch

from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.models.tiny import tiny_llama
from rollwright.training.advantages import RLOO, TurnTree
from rollwright.training.losses import k3, token_coefficients, token_losses
from rollwright.training.losses.divergences import estimate
from rollwright.training.micro_batches import PackedRow, pack, plan
from rollwright.training.rows import build_rows
from rollwright.training.settings import Aggregation, Correction, LossSettings, Ratio, TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Trajectory

Make = Callable[..., Trajectory]


def logs(*values: float) -> torch.Tensor:
    return torch.tensor([log(value) for value in values], dtype=torch.float64)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_clip_takes_the_gradient_where_the_ratio_has_gone_far_enough() -> None:
    new = logs(0.5, 0.5, 0.2, 0.2, 0.44).requires_grad_()
    engine = logs(0.4, 0.4, 0.4, 0.4, 0.4)
    found = token_losses(new, engine, numbers(1, -1, 1, -1, 1), LossSettings())
    assert found.ratios.tolist() == pytest.approx([1.25, 1.25, 0.5, 0.5, 1.1])
    assert found.losses.tolist() == pytest.approx([-1.2, 1.25, -0.5, 0.8, -1.1])
    assert found.clipped.tolist() == [True, False, False, True, False]
    found.losses.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0, 1.25, -0.5, 0, -1.1])


def test_an_asymmetric_clip_leaves_more_room_upwards() -> None:
    new, engine = logs(0.5, 0.2), logs(0.4, 0.4)
    found = token_losses(new, engine, numbers(1, -1), LossSettings(clip_low=0.1, clip_high=0.3))
    assert found.losses.tolist() == pytest.approx([-1.25, 0.9])


def test_truncated_importance_sampling_weighs_by_what_lies_between_engine_and_trainer() -> None:
    settings = LossSettings(ratio=Ratio.PROXIMAL, truncation=1.5)
    new, proximal, engine = logs(0.3, 0.3), logs(0.25, 0.25), logs(0.5, 0.1)
    found = token_losses(new, engine, numbers(1, 1), settings, proximal=proximal)
    assert found.ratios.tolist() == pytest.approx([1.2, 1.2])
    assert found.losses.tolist() == pytest.approx([-0.5 * 1.2, -1.5 * 1.2])


def test_without_an_update_before_it_the_proximal_ratio_is_one_with_a_gradient() -> None:
    new = logs(0.3).requires_grad_()
    found = token_losses(new, logs(0.6), numbers(2), LossSettings(ratio=Ratio.PROXIMAL))
    found.losses.sum().backward()
    assert found.ratios.tolist() == [1.0]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.5 * 2])


def test_the_divergence_from_the_base_model_is_added() -> None:
    found = token_losses(
        logs(0.4), logs(0.4), numbers(0), LossSettings(kl_coefficient=0.1), reference=logs(0.2)
    )
    assert found.divergence is not None
    assert found.divergence.tolist() == pytest.approx([0.5 - log(0.5) - 1])
    assert found.losses.tolist() == pytest.approx([0.1 * (0.5 - log(0.5) - 1)])


def test_the_divergence_is_right_in_expectation() -> None:
    new, reference = numbers(0.7, 0.2, 0.1), numbers(0.2, 0.3, 0.5)
    expected = (new * (new / reference).log()).sum()
    assert float((new * k3(new.log(), reference.log())).sum()) == pytest.approx(float(expected))


def test_entropy_lowers_the_loss() -> None:
    found = token_losses(
        logs(0.4), logs(0.4), numbers(1), LossSettings(entropy_coefficient=0.5), entropy=numbers(0.6)
    )
    assert found.losses.tolist() == pytest.approx([-1 - 0.3])


def test_ratios_far_out_stay_finite() -> None:
    found = token_losses(
        numbers(0.0), numbers(-500.0), numbers(-1), LossSettings(kl_coefficient=1), reference=numbers(500)
    )
    assert torch.isfinite(found.losses).all()


@pytest.fixture
def packed(forest: Make, chain: Make) -> list[PackedRow]:
    """A tree of two leaves and a chain."""
    groups = [[forest("a", [(None, 0.0), (0, 1.0), (0, 0.0)]), chain("b", [0.0, 0.5])]]
    return [pack(row) for row in build_rows(groups, TurnTree())]


def sums(rows: list[PackedRow], settings: LossSettings) -> dict[str, float]:
    found: dict[str, float] = {}
    for row, own in zip(rows, token_coefficients(rows, settings), strict=True):
        found[row.rollout_id] = found.get(row.rollout_id, 0.0) + float(own.sum())
    return found


def test_a_token_mean_divides_by_the_weighted_tokens_of_the_batch(packed: list[PackedRow]) -> None:
    weights = {
        name: sum(float(row.weights.sum()) for row in packed if row.rollout_id == name) for name in "ab"
    }
    found = sums(packed, LossSettings())
    assert sum(found.values()) == pytest.approx(1)
    assert found["a"] / found["b"] == pytest.approx(weights["a"] / weights["b"])


def test_a_sequence_mean_weighs_every_rollout_the_same_however_many_rows_it_has(
    packed: list[PackedRow],
) -> None:
    assert sums(packed, LossSettings(aggregation=Aggregation.SEQUENCE_MEAN)) == pytest.approx(
        {"a": 0.5, "b": 0.5}
    )


def test_a_constant_divides_by_itself(packed: list[PackedRow]) -> None:
    settings = LossSettings(aggregation=Aggregation.CONSTANT, constant_length=10)
    own = [row.weights / 20 for row in packed]
    assert all(torch.equal(a, b) for a, b in zip(token_coefficients(packed, settings), own, strict=True))


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_the_view_of_a_trajectory_does_not_change_what_its_tokens_weigh(
    chain: Make, aggregation: Aggregation
) -> None:
    groups = [[chain("a", [0.0, 1.0, 0.0]), chain("b", [0.0])]]
    settings = LossSettings(aggregation=aggregation)
    paths, turns = (
        token_coefficients([pack(row) for row in build_rows(groups, RLOO(), view=view)], settings)
        for view in ("paths", "turns")
    )
    assert torch.equal(torch.cat(paths), torch.cat(turns))


def test_a_packed_row_ends_before_its_last_trained_token(chain: Make) -> None:
    row = build_rows([[chain("a", [1.0, 0.0])]], RLOO())[0]
    found = pack(row)
    trained = [place for place, counts in enumerate(row.mask) if counts]
    assert found.inputs.tolist() == list(row.token_ids)[: trained[-1]]
    assert found.targets.tolist() == [row.token_ids[place] for place in trained]
    assert found.places.tolist() == [place - 1 for place in trained]


def test_micro_batches_hold_every_row_once_within_the_budget_and_with_little_padding() -> None:
    lengths = [17 * place % 190 + 10 for place in range(300)]
    found = plan(lengths, 1000)
    assert sorted(row for rows in found for row in rows) == list(range(300))
    padded = [len(rows) * max(lengths[row] for row in rows) for rows in found]
    assert max(padded) <= 1000
    assert sum(padded) < 1.03 * sum(lengths)


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    assert plan([50, 5000, 50], 1000) == [[1], [0, 2]]


def test_settings_out_of_range_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"training\.loss\.truncation: got 0\.5; expected 1 or more"):
        build({"training": {"loss": {"truncation": 0.5}}})
    with pytest.raises(ConfigError, match=r"temperature is 0; accepted: 0\.01 or more"):
        Trainer(tiny_llama(24, hidden_size=8, layers=1), TrainerSettings(device="cpu"), temperature=0)


def test_the_learning_rate_grows_and_then_stays() -> None:
    settings = TrainerSettings(learning_rate=1.0, warmup_updates=4)
    assert [settings.learning_rate_at(update) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert TrainerSettings(learning_rate=1.0).learning_rate_at(0) == 1.0


def test_the_learning_rate_falls_to_its_end() -> None:
    settings = TrainerSettings(learning_rate=1.0, warmup_updates=2, final_learning_rate=0.5)
    rates = [settings.learning_rate_at(update, 10) for update in (0, 1, 2, 5, 10, 12)]
    assert rates == pytest.approx([0.5, 0.95, 0.9, 0.75, 0.5, 0.5])


def test_a_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    new = logs(0.8, 0.8, 0.8).requires_grad_()
    found = token_losses(new, logs(0.1, 0.5, 0.1), numbers(-1, -1, 1), LossSettings(dual_clip=3))
    assert found.losses.tolist() == pytest.approx([3, 1.6, -1.2])
    assert found.clipped.tolist() == [True, False, True]
    found.losses.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0, 1.6, 0])


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    new = logs(0.8, 0.2).requires_grad_()
    found = token_losses(new, logs(0.4, 0.4), numbers(1, 1), LossSettings(name="cispo"))
    found.losses.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.2, -0.8])
    assert found.clipped.tolist() == [True, True]


def test_a_soft_gate_is_two_over_tau_with_the_slope_of_the_ratio_where_nothing_has_changed() -> None:
    new = logs(0.4, 0.4).requires_grad_()
    settings = LossSettings(name="sapo", options={"tau_negative": 2.0})
    found = token_losses(new, logs(0.4, 0.4), numbers(1, -1), settings)
    assert found.losses.tolist() == pytest.approx([-2, 1])
    found.losses.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1, 1])


def test_dppo_leaves_out_tokens_that_have_moved_too_far_in_the_direction_of_their_advantage() -> None:
    new = logs(0.8, 0.8, 0.1, 0.1).requires_grad_()
    old = logs(0.4, 0.4, 0.4, 0.4)
    for name in ("dppo_tv", "dppo_kl"):
        found = token_losses(new, old, numbers(1, -1, 1, -1), LossSettings(name=name))
        assert found.clipped.tolist() == [True, False, False, True]


def test_a_mask_takes_tokens_out_of_the_loss_whichever_ratio_is_clipped() -> None:
    new, engine = logs(0.4, 0.4, 0.4), logs(0.39, 0.1, 0.9)
    for ratio, kept in ((Ratio.ENGINE, 0.4 / 0.39), (Ratio.PROXIMAL, 0.4 / 0.39)):
        settings = LossSettings(ratio=ratio, correction=Correction.MASK)
        found = token_losses(new, engine, numbers(1, 1, 1), settings)
        assert found.losses.tolist() == pytest.approx([-kept, 0, 0])
    plain = token_losses(new, engine, numbers(1, 1, 1), LossSettings(correction=Correction.NONE))
    assert plain.losses.tolist() == pytest.approx([-0.4 / 0.39, -1.2, -0.4 / 0.9])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_an_estimate_with_a_plus_has_its_value_and_the_slope_of_k2(kind: str) -> None:
    found = {}
    for name in (kind, f"{kind}+", "k2"):
        new = logs(0.4).requires_grad_()
        value = estimate(new, logs(0.1), name)  # type: ignore[arg-type]
        value.sum().backward()
        assert new.grad is not None
        found[name] = (float(value.detach()), float(new.grad))
    assert found[f"{kind}+"] == pytest.approx((found[kind][0], found["k2"][1]))


def test_an_option_that_a_loss_does_not_have_is_refused_in_one_line(model: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"loss sapo: unknown setting 'tau'.*accepted: tau_positive, tau_neg"
    ):
        Trainer(model, TrainerSettings(loss=LossSettings(name="sapo", options={"tau": 1}), device="cpu"))
    with pytest.raises(ConfigError, match=r"loss gspo: unknown setting 'share'; accepted: max_log_ratio"):
        Trainer(model, TrainerSettings(loss=LossSettings(name="gspo", options={"share": 1}), device="cpu"))
    with pytest.raises(ConfigError, match=r"loss: unknown `gspoo` \(did you mean `gspo`\?\)"):
        Trainer(model, TrainerSettings(loss=LossSettings(name="gspoo"), device="cpu"))
