"""Losses that look at whole rollouts or at the whole update: the split of an update changes nothing."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from rollwright.training.advantages import GRPO, TurnTree
from rollwright.training.gradients import BeforeStep, TokenTally, add_gradients
from rollwright.training.micro_batches import PackedRow, pack
from rollwright.training.model import TrainedModel
from rollwright.training.rows import View, build_rows
from rollwright.training.settings import Correction, LossSettings, Ratio, TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Trajectory

Make = Callable[..., Trajectory]

OF_UPDATES = {
    "gspo": LossSettings(name="gspo"),
    "gmpo": LossSettings(name="gmpo"),
    "clip_cov": LossSettings(name="clip_cov", options={"share": 0.2, "low": -0.2, "high": 9.0}),
    "kl_cov": LossSettings(name="kl_cov", options={"share": 0.2}),
    "sequence_mask": LossSettings(correction=Correction.SEQUENCE_MASK, truncation=1e4, truncation_low=0.0),
    "geometric_mask": LossSettings(
        correction=Correction.GEOMETRIC_MASK, truncation_low=0.01, truncation=3.0, ratio=Ratio.PROXIMAL
    ),
    "off_policy": LossSettings(max_rollout_divergence=0.5, kl_coefficient=0.1),
}


@pytest.fixture
def groups(forest: Make, chain: Make) -> list[list[Trajectory]]:
    """A tree, and chains of different lengths."""
    tree = forest("a", [(None, 0.0), (0, 1.0), (0, 0.2), (1, 0.0)])
    return [
        [tree, chain("b", [0.0, 0.5, 0.0])],
        [chain("c", [1.0]), chain("d", [0.0, 0.3]), chain("e", [0.1, 0.4])],
    ]


def gradient(
    model: Any, rows: list[PackedRow], loss: LossSettings, budget: int = 10_000
) -> tuple[torch.Tensor, TokenTally]:
    trained = TrainedModel(model, TrainerSettings(device="cpu", loss=loss))
    trained.module.zero_grad(set_to_none=True)
    reference = [torch.full_like(row.engine, -2.0) for row in rows] if loss.kl_coefficient else None
    tally = add_gradients(
        trained, rows, loss, tokens_per_micro_batch=budget, before=BeforeStep(reference=reference), seed=5
    )
    parts = [each.grad.flatten() for each in trained.trained_parameters().values()]
    return torch.cat(parts).clone(), tally


@pytest.mark.parametrize("loss", OF_UPDATES.values(), ids=OF_UPDATES)
def test_micro_batches_do_not_change_the_gradient(
    model: Any, groups: list[list[Trajectory]], loss: LossSettings
) -> None:
    rows = [pack(row) for row in build_rows(groups, TurnTree())]
    whole, one = gradient(model, rows, loss)
    parts, many = gradient(model, rows, loss, budget=1)
    assert one.micro_batches < many.micro_batches == len(rows)
    assert float(whole.abs().max()) > 1e-3
    assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))
    assert (one.sums["clipped"], one.loss) == pytest.approx((many.sums["clipped"], many.loss), abs=1e-5)


@pytest.mark.parametrize("loss", OF_UPDATES.values(), ids=OF_UPDATES)
def test_the_view_of_a_trajectory_does_not_change_the_gradient(
    model: Any, groups: list[list[Trajectory]], loss: LossSettings
) -> None:
    views: tuple[View, View] = ("paths", "turns")
    found = [
        gradient(model, [pack(row) for row in build_rows(groups[1:], TurnTree(), view=view)], loss)[0]
        for view in views
    ]
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["gspo", "gmpo", "cispo", "dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov"]
)
def test_every_loss_trains_through_the_trainer(
    model: Any, groups: list[list[Trajectory]], scored: Callable[..., Any], name: str
) -> None:
    rows = scored(build_rows(groups, GRPO()), model)
    settings = TrainerSettings(
        device="cpu", learning_rate=1e-3, epochs=2, loss=LossSettings(name=name, ratio=Ratio.PROXIMAL)
    )
    learner = Trainer(model, settings)
    report = learner.step(rows)
    assert (report.skipped, report.updates, learner.version) == (None, 2, 1)
    assert report.grad_norm > 0


def test_a_loss_of_ones_own_may_look_at_the_whole_update(
    model: Any, groups: list[list[Trajectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def centred(new: torch.Tensor, engine: Any, advantages: torch.Tensor, settings: Any, **more: Any) -> Any:
        return -(advantages - more["prepared"]["mean"]) * new

    def prepare(update: Any, settings: Any) -> dict[str, torch.Tensor]:
        return {"mean": torch.full_like(update.new, float(update.advantages.mean()))}

    centred.prepare = prepare  # type: ignore[attr-defined]
    module = ModuleType("own_losses")
    module.centred = centred  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = [pack(row) for row in build_rows(groups, GRPO())]
    loss = LossSettings(name="own_losses:centred")
    whole, parts = (gradient(model, rows, loss, budget)[0] for budget in (10_000, 1))
    assert torch.allclose(whole, parts, rtol=1e-5, atol=1e-6)
