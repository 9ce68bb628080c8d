"""Losses that look at whole rollouts or at the whole update: the split of an update changes nothing."""

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from rollwright.training.advantages import GRPO, TurnTree
from rollwright.training.gradients import BeforeStep, TokenTally, add_gradients
from rollwright.training.losses.named import prepare, prepares, token_losses
from rollwright.training.losses.update_tokens import UpdateTokens
from rollwright.training.micro_batches import PackedRow, pack
from rollwright.training.model import TrainedModel
from rollwright.training.report import Skip
from rollwright.training.rows import Row, View, build_rows
from rollwright.training.settings import Correction, LossSettings, Ratio, TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Trajectory, floats

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

    def prepare_mean(update: Any, settings: Any) -> dict[str, torch.Tensor]:
        return {"mean": torch.full_like(update.new, float(update.advantages.mean()))}

    centred.prepare = prepare_mean  # type: ignore[attr-defined]
    module = ModuleType("own_losses")
    module.centred = centred  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = [pack(row) for row in build_rows(groups, GRPO())]
    loss = LossSettings(name="own_losses:centred")
    whole, parts = (gradient(model, rows, loss, budget)[0] for budget in (10_000, 1))
    assert torch.allclose(whole, parts, rtol=1e-5, atol=1e-6)


EVERY_LOSS = ["clipped", "gspo", "gmpo", "cispo", "dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov"]


@pytest.mark.parametrize("correction", list(Correction))
@pytest.mark.parametrize("ratio", list(Ratio))
@pytest.mark.parametrize("name", EVERY_LOSS)
def test_ratios_beyond_all_reason_give_finite_losses_and_gradients(
    name: str, ratio: Ratio, correction: Correction
) -> None:
    loss = LossSettings(
        name=name,
        ratio=ratio,
        correction=correction,
        kl_coefficient=0.1,
        entropy_coefficient=0.1,
        max_rollout_divergence=3.0,
    )
    for engine, sign in (
        (-120.0, 1.0),
        (-120.0, -1.0),
        (-18.9, -1.0),
        (-1e-6, 1.0),
        (-1e-6, -1.0),
        (-2.0, 0.0),
    ):
        told = torch.tensor([engine, -0.5, engine, engine, -300.0])
        new = torch.full((5,), -0.4 if engine < -1 else -250.0)
        advantages = sign * torch.tensor([1.0, 2.0, 1.0, 1.0, 0.5])
        before = new + torch.tensor([0.1, -0.1, 0.0, 30.0, -30.0])
        old = before if ratio is Ratio.PROXIMAL else told
        update = UpdateTokens(
            new, old, before, told, advantages, torch.ones(5), torch.tensor([0, 0, 1, 2, 2])
        )
        current = new.clone().requires_grad_()
        found = token_losses(
            current,
            told,
            advantages,
            loss,
            proximal=before,
            reference=torch.full((5,), -80.0),
            entropy=torch.ones(5),
            prepared=prepare(update, loss) if prepares(loss) else None,
        )
        (slope,) = torch.autograd.grad(found.losses.sum(), current)
        assert torch.isfinite(found.losses).all()
        assert torch.isfinite(slope).all()


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_odd_batches_are_trained_or_skipped_for_a_reason_and_never_spoil_the_weights(
    model: Any, chain: Make, scored: Callable[..., Any], name: str
) -> None:
    def weights() -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    settings = TrainerSettings(
        device="cpu", learning_rate=1e-3, max_logprob_gap=1e9, loss=LossSettings(name=name)
    )
    learner = Trainer(model, settings)
    pair = scored(build_rows([[chain("a", [1.0]), chain("b", [0.0, 0.3])]], GRPO()), model)
    masked = [
        msgspec.structs.replace(
            row,
            mask=bytes(len(row.mask)),
            **{each: floats([0.0] * len(row.mask)) for each in ("weights", "advantages", "logprobs")},
        )
        for row in pair
    ]
    nan = [
        msgspec.structs.replace(row, logprobs=floats([math.nan if own else 0.0 for own in row.mask]))
        for row in pair
    ]
    single = [_only_last_token(row) for row in pair]
    begin = weights()
    assert learner.step([]).skipped is Skip.EMPTY
    assert learner.step(masked).skipped is Skip.EMPTY
    assert learner.step(nan).skipped is Skip.NOT_FINITE
    assert learner.step([pair[0], *nan[1:]]).skipped is Skip.NOT_FINITE, (
        "one bad row spoils the batch, not the weights"
    )
    assert torch.equal(weights(), begin)
    assert learner.version == 0
    assert learner.step([masked[0], *single[1:]]).skipped is None, (
        "an untrained row beside others is no fault"
    )
    assert learner.step(single).skipped is None
    assert torch.isfinite(weights()).all()
    assert not torch.equal(weights(), begin)


def _only_last_token(row: Row) -> Row:
    place = max(place for place, own in enumerate(row.mask) if own)
    kept = [each == place for each in range(len(row.mask))]
    fields = {
        name: floats([value if own else 0.0 for value, own in zip(getattr(row, name), kept, strict=True)])
        for name in ("weights", "advantages", "logprobs")
    }
    return msgspec.structs.replace(row, mask=bytes(kept), **fields)
