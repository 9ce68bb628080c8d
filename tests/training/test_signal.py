"""Signal and noise of a gradient from its halves: exact where they are known, and no change of the update."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rollwright.training import signal as signal_module
from rollwright.training.advantages import GRPO
from rollwright.training.micro_batches import PackedRow
from rollwright.training.rows import Row, build_rows
from rollwright.training.settings import TrainerSettings
from rollwright.training.signal import SplitHalf, split_half
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Trajectory

Make = Callable[..., Trajectory]
Score = Callable[..., list[Row]]
NOTHING = torch.zeros(0)


def packed(group: str) -> PackedRow:
    return PackedRow("r", *[NOTHING] * 8, group_id=group)


def measured(groups: torch.Tensor) -> tuple[float, float]:
    """Of a batch whose gradient is the mean over groups; one row of `groups` for each."""
    parameter = nn.Parameter(torch.zeros(groups.shape[1]))
    split = SplitHalf([packed(str(group)) for group in range(len(groups))], [parameter])
    parts = groups / len(groups)
    parameter.grad = parts[sorted(split.first)].sum(0)
    split.note_first()
    parameter.grad = parts.sum(0)
    found = split.finish()
    assert found is not None
    return found.signal, found.noise


@pytest.mark.parametrize("groups", [4, 5, 8])
def test_means_over_many_batches_are_the_true_signal_and_noise(groups: int) -> None:
    """Also with halves of different size."""
    generator = torch.Generator().manual_seed(0)
    expected, spread = torch.tensor([0.5, -0.2, 0.1]), 0.8
    figures = [measured(expected + spread * torch.randn(groups, 3, generator=generator)) for _ in range(4000)]
    signal, noise = (sum(each) / len(figures) for each in zip(*figures, strict=True))
    assert signal == pytest.approx(float(expected @ expected), abs=0.03)
    assert noise == pytest.approx(3 * spread**2 / groups, rel=0.05)


def test_a_large_model_is_looked_at_in_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    groups = torch.randn(2, 10_000, generator=generator) + 0.5
    whole = measured(groups)
    monkeypatch.setattr(signal_module, "MOST_ELEMENTS", 1000)
    part = measured(groups)
    assert part[0] / part[1] == pytest.approx(whole[0] / whole[1], rel=0.2)
    assert part[1] == pytest.approx(whole[1] / 10, rel=0.2)


@pytest.fixture
def rows(chain: Make) -> list[Row]:
    groups = [
        [
            chain(f"{group}{member}", [0.0, float((member + group) % 3 == 0)], group=str(group))
            for member in range(4)
        ]
        for group in range(3)
    ]
    return build_rows(groups, GRPO())


def step(model: Any, rows: list[Row], signal_steps: int) -> tuple[Any, dict[str, torch.Tensor]]:
    own = copy.deepcopy(model)
    report = Trainer(own, TrainerSettings(learning_rate=1e-2, device="cpu", signal_steps=signal_steps)).step(
        rows
    )
    return report, own.state_dict()


def test_measuring_changes_no_update(model: Any, rows: list[Row], scored: Score) -> None:
    batch = scored(rows, model)
    plain, without = step(model, batch, 0)
    found, measured_too = step(model, batch, 1)
    assert plain.gradient_signal is None
    assert found.gradient_noise > 0
    assert found.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    assert found.computed_tokens == plain.computed_tokens, "no pass is made for it"
    for name, each in without.items():
        torch.testing.assert_close(measured_too[name], each, rtol=1e-3, atol=1e-4, msg=name)


def test_the_figures_reach_the_writers_only_where_they_were_measured(
    model: Any, rows: list[Row], scored: Score
) -> None:
    learner = Trainer(model, TrainerSettings(learning_rate=1e-4, device="cpu", signal_steps=2))
    figures = [learner.step(scored(rows, model)).figures() for _ in range(4)]
    assert ["gradient_signal" in each for each in figures] == [True, False, True, False]


def test_one_group_has_no_halves() -> None:
    assert split_half([packed("a"), packed("a")], {}) is None
