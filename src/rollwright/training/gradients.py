"""Gradient accumulation: the gradient of a batch's loss, summed over micro-batches.

Always true: the gradient does not depend on how rows are split into micro-batches, because the coefficient of each token
is computed for the whole batch before the first of them. Nothing here changes a weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollwright.training.losses import (
    TokenLosses,
    UpdateTokens,
    k3,
    prepare,
    prepares,
    rollout_indices,
    token_coefficients,
    token_losses,
)
from rollwright.training.micro_batches import MicroBatch, PackedRow, bundle_rows, collate, plan_bundles
from rollwright.training.model import TrainedModel
from rollwright.training.settings import LossSettings, Ratio


@dataclass(frozen=True)
class BeforeStep:
    """Log-probabilities that are constant during a step, by row; `None` if they are not needed."""

    proximal: Sequence[Tensor] | None = None
    """Those of the trained model before the first update of the step."""
    reference: Sequence[Tensor] | None = None
    """Those of the base model."""


NOTHING_BEFORE = BeforeStep()


@dataclass
class TokenTally:
    """Sums over the tokens that went through the model."""

    loss: float = 0.0
    tokens: int = 0
    """Trained tokens."""
    computed: int = 0
    """All tokens, without padding."""
    shared: int = 0
    """Tokens that were not computed because another row has them in the same place."""
    padded: int = 0
    """All tokens, with padding."""
    micro_batches: int = 0
    ratio_max: float = 0.0
    gap_max: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    """Sums over the trained tokens, by name."""

    def mean(self, name: str) -> float:
        return self.sums.get(name, 0.0) / self.tokens if self.tokens else 0.0

    def add(
        self, batch: MicroBatch, length: int, loss: Tensor, terms: TokenLosses, new: Tensor, entropy: Tensor
    ) -> None:
        """`length`: tokens of the rows, counted in each of them."""
        gap = (new.detach() - batch.engine).abs()
        named = {
            "entropy": entropy.detach().sum(),
            "ratio": terms.ratios.sum(),
            "clipped": terms.clipped.sum(),
            "gap": gap.sum(),
            "gap_k3": k3(batch.engine, new.detach()).sum(),
        }
        if terms.divergence is not None:
            named["divergence"] = terms.divergence.sum()
        peaks = [loss.detach(), terms.ratios.max(), gap.max()]
        # One device-to-host transfer for all numbers: each transfer waits for the device.
        numbers = torch.stack([each.float() for each in (*peaks, *named.values())]).tolist()
        self.loss += numbers[0]
        self.ratio_max = max(self.ratio_max, numbers[1])
        self.gap_max = max(self.gap_max, numbers[2])
        for name, number in zip(named, numbers[3:], strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + number
        self.tokens += len(batch.targets)
        self.computed += batch.computed
        self.shared += length - batch.computed
        self.padded += batch.tokens
        self.micro_batches += 1


def add_gradients(
    model: TrainedModel,
    rows: Sequence[PackedRow],
    settings: LossSettings,
    *,
    tokens_per_micro_batch: int,
    before: BeforeStep = NOTHING_BEFORE,
    seed: int = 0,
    on_progress: Callable[[], None] = lambda: None,
) -> TokenTally:
    """Adds the gradient of the loss of `rows` to the model's parameters. `on_progress` is called after every micro-batch.

    `seed`: for losses that choose tokens at random. A row without an advantage counts in the divisor of the loss, but is not
    computed if its gradient is 0.
    """
    coefficients = token_coefficients(rows, settings)
    moving = [place for place, row in enumerate(rows) if not settings.only_advantages or row.advantages.any()]
    tally = TokenTally()
    prepared: list[dict[str, Tensor]] | None = None
    if moving and prepares(settings):
        current = logprobs_of_rows(
            lambda batch: model.logprobs(batch)[0],
            rows,
            model.device,
            tokens_per_micro_batch,
            on_progress,
            tokens_per_pair=model.tokens_per_pair,
        )
        prepared = prepare_rows(rows, current, before.proximal, settings, seed)
    joined = bundle_rows(rows, moving, tokens_per_micro_batch, model.tokens_per_pair)
    for bundles in plan_bundles(joined, tokens_per_micro_batch):
        batch = collate(rows, bundles, model.device)
        places = batch.rows
        new, entropy = model.logprobs(batch, entropy_gradient=settings.entropy_coefficient > 0)
        terms = token_losses(
            new,
            batch.engine,
            batch.advantages,
            settings,
            proximal=_of(before.proximal, places),
            reference=_of(before.reference, places),
            entropy=entropy,
            prepared=None if prepared is None else _joined([prepared[place] for place in places]),
        )
        weights = torch.cat([coefficients[place] for place in places]).to(model.device)
        loss = (weights * terms.losses).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        tally.add(batch, sum(rows[place].length for place in places), loss, terms, new, entropy)
        on_progress()
    return tally


def prepare_rows(
    rows: Sequence[PackedRow],
    current: Sequence[Tensor],
    proximal: Sequence[Tensor] | None,
    settings: LossSettings,
    seed: int,
) -> list[dict[str, Tensor]]:
    """For each row, the tensors that the loss prepares from all rows of the update; `current`: their log-probabilities."""
    new = torch.cat(list(current))
    before = new if proximal is None else torch.cat(list(proximal))
    engine = torch.cat([row.engine for row in rows]).to(new.device)
    update = UpdateTokens(
        new=new,
        old=before if settings.ratio is Ratio.PROXIMAL else engine,
        before=before,
        engine=engine,
        advantages=torch.cat([row.advantages for row in rows]).to(new.device),
        weights=torch.cat([row.weights for row in rows]).to(new.device),
        rollouts=rollout_indices(rows).to(new.device),
        seed=seed,
    )
    sizes = [len(row.targets) for row in rows]
    found = {name: torch.split(each, sizes) for name, each in prepare(update, settings).items()}
    return [{name: parts[place] for name, parts in found.items()} for place in range(len(rows))]


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _of(values: Sequence[Tensor] | None, places: Sequence[int]) -> Tensor | None:
    return None if values is None else torch.cat([values[place] for place in places])


def logprobs_of_rows(
    score: Callable[[MicroBatch], Tensor],
    rows: Sequence[PackedRow],
    device: torch.device,
    tokens_per_micro_batch: int,
    on_progress: Callable[[], None] = lambda: None,
    *,
    tokens_per_pair: float | None = None,
) -> list[Tensor]:
    """For each row, the result of `score` for its trained tokens, without gradient."""
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    with torch.no_grad():
        joined = bundle_rows(rows, range(len(rows)), tokens_per_micro_batch, tokens_per_pair)
        for bundles in plan_bundles(joined, tokens_per_micro_batch):
            batch = collate(rows, bundles, device)
            sizes = [len(rows[place].targets) for place in batch.rows]
            for place, own in zip(batch.rows, torch.split(score(batch), sizes), strict=True):
                found[place] = own
            on_progress()
    return found
