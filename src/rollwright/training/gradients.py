"""Gradient accumulation: the gradient of a batch's loss, summed over micro-batches.

Always true: the gradient does not depend on how rows are split into micro-batches, because the coefficient of each token
is computed for the whole batch before the first of them. Nothing here changes a weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollwright.errors import RollwrightError
from rollwright.training.critic import Critic, ValueLosses
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
from rollwright.training.prefixes import Bundle
from rollwright.training.ranks.collective import Ranks
from rollwright.training.ranks.dealing import deal, imbalance
from rollwright.training.settings import LossSettings, Ratio
from rollwright.training.signal import SplitHalf


@dataclass(frozen=True)
class BeforeStep:
    """Log-probabilities that are constant during a step, by row; `None` if they are not needed."""

    proximal: Sequence[Tensor] | None = None
    """Those of the trained model before the first update of the step."""
    reference: Sequence[Tensor] | None = None
    """Those of the base model."""


NOTHING_BEFORE = BeforeStep()


_NAMES = ("entropy", "ratio", "clipped", "gap", "gap_k3", "divergence", "value_loss", "value_clipped")
"""Names of the sums of a tally."""


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
    imbalance: float = 0.0
    """Tokens of the most loaded rank divided by the mean over ranks, minus 1."""

    def reduced(self, ranks: Ranks) -> "TokenTally":
        """The tally of all ranks."""
        if ranks.size == 1:
            return self
        counts = [self.loss, self.tokens, self.computed, self.shared, self.padded, self.micro_batches]
        named = [self.sums.get(name, 0.0) for name in _NAMES]
        there = [float(name in self.sums) for name in _NAMES]
        found = ranks.sums([*counts, *named, *there])
        sums, known = found[len(counts) : -len(_NAMES)], found[-len(_NAMES) :]
        loss, tokens, computed, shared, padded, micro_batches = found[: len(counts)]
        ratio_max, gap_max = ranks.maxima([self.ratio_max, self.gap_max])
        return TokenTally(
            loss=loss,
            tokens=int(tokens),
            computed=int(computed),
            shared=int(shared),
            padded=int(padded),
            micro_batches=int(micro_batches),
            ratio_max=ratio_max,
            gap_max=gap_max,
            sums={name: value for name, value, is_known in zip(_NAMES, sums, known, strict=True) if is_known},
            imbalance=self.imbalance,
        )

    def mean(self, name: str) -> float:
        return self.sums.get(name, 0.0) / self.tokens if self.tokens else 0.0

    def add(
        self,
        batch: MicroBatch,
        length: int,
        loss: Tensor,
        terms: TokenLosses,
        new: Tensor,
        entropy: Tensor,
        value_terms: ValueLosses | None = None,
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
        if value_terms is not None:
            named["value_loss"] = value_terms.losses.detach().sum()
            named["value_clipped"] = value_terms.clipped.sum()
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
    critic: Critic | None = None,
    seed: int = 0,
    on_progress: Callable[[], None] = lambda: None,
    split: SplitHalf | None = None,
) -> TokenTally:
    """Adds the gradient of the loss of `rows` to the model's parameters. `on_progress` is called after every micro-batch.

    `critic`: adds the loss of the model's value head; rows then have values and returns. `seed`: for losses that choose tokens
    at random. `split`: the rows of its first half go first, and it notes their gradient. A row without an advantage counts in the divisor of the loss, but is not computed if its gradient is 0.
    """
    coefficients = token_coefficients(rows, settings)
    every = critic is not None or not settings.only_advantages
    moving = [place for place, row in enumerate(rows) if every or row.advantages.any()]
    tally = TokenTally()
    prepared: list[dict[str, Tensor]] | None = None
    if moving and prepares(settings):
        current = logprobs_of_rows(
            lambda batch: model.logprobs(batch)[0],
            rows,
            model.device,
            tokens_per_micro_batch,
            on_progress,
            model=model,
        )
        prepared = prepare_rows(rows, current, before.proximal, settings, seed)
    if not moving:
        return tally

    def add(bundles: Sequence[Bundle]) -> None:
        batch = collate(rows, bundles, model.device)
        places = batch.rows
        bonus = settings.entropy_coefficient > 0
        values: Tensor | None = None
        if critic is None:
            new, entropy = model.logprobs(batch, entropy_gradient=bonus)
        else:
            new, entropy, values = model.logprobs_and_values(
                batch, entropy_gradient=bonus, trunk=critic.reaches_trunk
            )
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
        value_terms = None
        if critic is not None and values is not None:
            value_terms = critic.losses(values, batch)
            loss = critic.total(loss, (weights * value_terms.losses).sum())
        loss.backward()  # type: ignore[no-untyped-call]
        length = sum(rows[place].length for place in places)
        tally.add(batch, length, loss, terms, new, entropy, value_terms)
        on_progress()

    def add_rows(chosen: Sequence[int]) -> None:
        if chosen:
            joined = bundle_rows(rows, chosen, tokens_per_micro_batch, model.tokens_per_pair)
            tally.imbalance = run_passes(model, joined, tokens_per_micro_batch, add, gradients=True)

    if split is None:
        add_rows(moving)
    else:
        add_rows([place for place in moving if place in split.first])
        split.note_first()
        add_rows([place for place in moving if place not in split.first])
    return tally.reduced(model.ranks)


def run_passes(
    model: TrainedModel,
    joined: Sequence[Bundle],
    budget: int,
    compute: Callable[[Sequence[Bundle]], None],
    *,
    gradients: bool = False,
    reference: bool = False,
) -> float:
    """Deals the bundles out and runs `compute` for each micro-batch of this rank; returns the imbalance of the deal.

    An error of one rank is one of all ranks. `gradients`: sums up the ranks' gradients at the end. `reference`: passes go
    through the base model.
    """
    ranks = model.ranks
    lengths = [each.length for each in joined]
    dealt = deal(lengths, ranks.size)
    plans = [plan_bundles([joined[place] for place in items], budget) for items in dealt]
    own = plans[ranks.rank]
    if (
        ranks.size > 1 and not model.gathers_once
    ):  # every pass communicates, so ranks make equal numbers of them
        for bundles in own:
            compute(bundles)
        for _ in range(max(map(len, plans)) - len(own)):
            model.touch(reference=reference)
        if gradients:
            model.reduce_gradients()
        return imbalance(lengths, dealt)
    error: Exception | None = None
    with model.gathered(reference=reference):
        try:
            for bundles in own:
                compute(bundles)
        except (RuntimeError, MemoryError, ValueError, RollwrightError) as caught:
            error = caught
        try:
            ranks.agree(error)
        finally:
            if gradients:  # also after an error: it leaves no gradient of these passes behind
                model.reduce_gradients()
    return imbalance(lengths, dealt)


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
    model: TrainedModel | None = None,
    reference: bool = False,
) -> list[Tensor]:
    """For each row, the result of `score` for its trained tokens, without gradient.

    `model`: deals rows out to its ranks and joins rows with a common prefix. `reference`: `score` is of the base model.
    """
    found: list[Tensor] = [torch.empty(0)] * len(rows)

    def add(bundles: Sequence[Bundle]) -> None:
        batch = collate(rows, bundles, device)
        sizes = [len(rows[place].targets) for place in batch.rows]
        for place, own in zip(batch.rows, torch.split(score(batch), sizes), strict=True):
            found[place] = own
        on_progress()

    pairs = None if model is None else model.tokens_per_pair
    with torch.no_grad():
        joined = bundle_rows(rows, range(len(rows)), tokens_per_micro_batch, pairs)
        if model is None:
            for bundles in plan_bundles(joined, tokens_per_micro_batch):
                add(bundles)
            return found
        run_passes(model, joined, tokens_per_micro_batch, add, reference=reference)
    if model.ranks.size == 1:
        return found
    sizes = [len(row.targets) for row in rows]
    own = [each if len(each) else torch.zeros(size) for each, size in zip(found, sizes, strict=True)]
    return list(torch.split(model.ranks.add_up(torch.cat(own)), sizes))
