"""Losses against verl's and TRL's own functions: value and gradient of every token.

By default on a few recorded batches; `make test-losses` records 1,000 anew, in an environment with verl and TRL, and sets
`ROLLWRIGHT_PEER_LOSSES` to the file.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rollwright.training.gradients import prepare_rows
from rollwright.training.losses import prepares, token_coefficients, token_losses
from rollwright.training.micro_batches import PackedRow
from rollwright.training.settings import LOSSES, Aggregation, Correction, LossSettings

RECORD = Path(os.environ.get("ROLLWRIGHT_PEER_LOSSES", Path(__file__).parent / "data" / "peer_losses.npz"))
PEERS: Mapping[str, Any] = dict(numpy.load(RECORD))


def case_of(advantages: str = "advantages", **settings: Any) -> tuple[LossSettings, str]:
    return LossSettings(**settings), advantages


CASES = {name: case_of(**each) for name, each in json.loads(str(PEERS["settings"])).items()}
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Batch:
    """One random batch: a row for each rollout, and the same tokens one after the other."""

    number: int
    advantages: str = "advantages"
    """Name of the advantages: of each token, or one for each rollout."""

    def flat(self, name: str) -> torch.Tensor:
        return torch.tensor(PEERS[name][self.number], dtype=torch.float64)[self.mask]

    @property
    def mask(self) -> torch.Tensor:
        return torch.tensor(PEERS["mask"][self.number]).bool()

    def rows(self) -> list[PackedRow]:
        lengths = self.mask.sum(1).tolist()
        engine, advantages = (self.flat(name).split(lengths) for name in ("engine", self.advantages))
        return [
            PackedRow(
                rollout_id=str(row),
                inputs=torch.zeros(length, dtype=torch.long),
                places=torch.arange(length),
                targets=torch.zeros(length, dtype=torch.long),
                engine=engine[row],
                advantages=advantages[row],
                weights=torch.ones(length, dtype=torch.float64),
                versions=torch.zeros(length, dtype=torch.int32),
                temperatures=torch.ones(length),
            )
            for row, length in enumerate(lengths)
        ]


def loss_and_gradient(batch: Batch, settings: LossSettings) -> tuple[float, torch.Tensor]:
    rows = batch.rows()
    sizes = [len(row.targets) for row in rows]
    new = batch.flat("new").requires_grad_()
    proximal = batch.flat("old") if settings.uses_model_before_step else None
    prepared = None
    if prepares(settings):
        before = None if proximal is None else proximal.split(sizes)
        parts = prepare_rows(rows, new.detach().split(sizes), before, settings, seed=0)
        prepared = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    found = token_losses(
        new,
        batch.flat("engine"),
        batch.flat(batch.advantages),
        settings,
        proximal=proximal,
        reference=batch.flat("reference"),
        entropy=batch.flat("entropy") * new.square(),
        prepared=prepared,
    )
    loss = (torch.cat(token_coefficients(rows, settings)) * found.losses).sum()
    (gradient,) = torch.autograd.grad(loss, new)
    return float(loss.detach()), gradient


@pytest.mark.parametrize("case", CASES)
def test_a_loss_and_its_gradient_equal_the_peers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randperm", lambda count, **_: torch.arange(count))
    settings, advantages = CASES[case]
    for number, value in enumerate(PEERS[f"value {case}"]):
        batch = Batch(number, advantages)
        found, gradient = loss_and_gradient(batch, settings)
        expected = batch.flat(f"gradient {case}")
        assert found == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), f"batch {number}"
        assert torch.allclose(gradient, expected, rtol=TOLERANCE, atol=TOLERANCE), f"batch {number}"


def test_every_built_in_loss_aggregation_and_correction_is_compared() -> None:
    settings = [each for each, _ in CASES.values()]
    assert {each.name for each in settings} == set(LOSSES.kinds)
    assert {each.aggregation for each in settings} == set(Aggregation)
    assert {each.correction for each in settings} == set(Correction) - {Correction.NONE}


def test_the_batches_have_uneven_masks_and_large_ratios() -> None:
    ratios = numpy.abs(PEERS["new"] - PEERS["engine"])[PEERS["mask"] > 0]
    assert ratios.max() > 7
    assert len(numpy.unique(PEERS["mask"].sum(2))) > 5
