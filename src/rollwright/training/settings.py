"""The trainer's settings: plain frozen data, checked when made, without torch."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rollwright.errors import ConfigError
from rollwright.trajectory import MIN_TEMPERATURE


class Aggregation(StrEnum):
    """What the sum over tokens is divided by. A tree's tokens count by their weights everywhere."""

    TOKEN_MEAN = "token_mean"
    """The tokens of the batch: every token weighs the same, long episodes more."""
    SEQUENCE_MEAN = "sequence_mean"
    """The tokens of each rollout, then the rollouts: every rollout weighs the same."""
    CONSTANT = "constant"
    """`constant_length` for each rollout: neither length nor luck changes a token's weight (Dr. GRPO)."""


class Ratio(StrEnum):
    """Whose probability the new one is compared with."""

    ENGINE = "engine"
    """The engine's, which sampled: one ratio corrects for staleness and for numerical differences."""
    PROXIMAL = "proximal"
    """The trainer's own before the step, for clipping; what lies between it and the engine's becomes a weight that
    is cut at `truncation` (truncated importance sampling)."""


@dataclass(frozen=True)
class LossSettings:
    """The clipped policy-gradient loss and what may be added to it."""

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_length: int = 1024
    """Tokens that `Aggregation.CONSTANT` divides a rollout by."""
    clip_low: float = 0.2
    """The ratio counts down to `1 - clip_low`."""
    clip_high: float = 0.2
    """The ratio counts up to `1 + clip_high`; more than `clip_low` leaves room for unlikely tokens to grow."""
    ratio: Ratio = Ratio.ENGINE
    truncation: float = 2.0
    """Most that the weight of `Ratio.PROXIMAL` may be."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the base model; 0 keeps no base model in memory."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy, which is then driven up."""

    def __post_init__(self) -> None:
        _check("loss.constant_length", self.constant_length, self.constant_length > 0, "above 0")
        _check("loss.clip_low", self.clip_low, 0 <= self.clip_low <= 1, "0 to 1")
        _check("loss.clip_high", self.clip_high, self.clip_high >= 0, "0 or more")
        _check("loss.truncation", self.truncation, self.truncation >= 1, "1 or more")
        _check("loss.kl_coefficient", self.kl_coefficient, self.kl_coefficient >= 0, "0 or more")
        _check(
            "loss.entropy_coefficient", self.entropy_coefficient, self.entropy_coefficient >= 0, "0 or more"
        )

    @property
    def only_advantages(self) -> bool:
        """Whether a token without advantage has no gradient."""
        return self.kl_coefficient == 0 and self.entropy_coefficient == 0


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters instead of all weights."""

    rank: int = 16
    alpha: int = 32
    """The adapter's product is scaled by `alpha / rank`."""
    modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Which layers get one, by the end of their names."""

    def __post_init__(self) -> None:
        _check("lora.rank", self.rank, self.rank > 0, "above 0")
        _check("lora.alpha", self.alpha, self.alpha > 0, "above 0")


@dataclass(frozen=True)
class TrainerSettings:
    """How batches become new weights."""

    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    """A short memory of squares: in RL the gradient's size changes while the policy does."""
    weight_decay: float = 0.0
    """On matrices only."""
    warmup_updates: int = 0
    """Over which the learning rate grows from 0."""
    final_learning_rate: float | None = None
    """What it falls to, evenly, over `total_updates`; `None`: it stays."""
    total_updates: int = 1
    """Updates of the whole training."""
    max_grad_norm: float = 1.0
    tokens_per_micro_batch: int = 2048
    """With padding; memory grows with it. More does not make a CPU faster, because activations leave its cache."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batches: int = 1
    """Optimiser updates in each pass; rollouts are kept whole."""
    temperature: float = 1.0
    """Of tokens that do not say at which temperature they were drawn; log-probabilities are of the same distribution as
    the engine's."""
    loss: LossSettings = field(default_factory=LossSettings)
    lora: LoraSettings | None = None
    """`None`: all weights are trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations; weights and optimiser stay in the model's own."""
    device: str = "auto"
    seed: int = 0
    max_logprob_gap: float = 0.5
    """Mean difference, in nats, between the engine's log-probabilities and the trainer's, above which a batch is not
    trained on: the engine has other weights, another temperature or another tokenizer. bf16 engines show 0.03."""
    max_skips_in_a_row: int = 3
    """Steps without an update, for a loss that is not finite or a gap too wide, after which training stops."""

    def __post_init__(self) -> None:
        finite = math.isfinite(self.learning_rate)
        _check("learning_rate", self.learning_rate, finite and self.learning_rate >= 0, "0 or more")
        _check(
            "betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers in 0 to 1, without 1"
        )
        _check("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _check("total_updates", self.total_updates, self.total_updates >= 1, "1 or more")
        _check("warmup_updates", self.warmup_updates, self.warmup_updates >= 0, "0 or more")
        _check("max_grad_norm", self.max_grad_norm, self.max_grad_norm > 0, "above 0")
        _check(
            "tokens_per_micro_batch", self.tokens_per_micro_batch, self.tokens_per_micro_batch > 0, "above 0"
        )
        _check("epochs", self.epochs, self.epochs > 0, "1 or more")
        _check("mini_batches", self.mini_batches, self.mini_batches > 0, "1 or more")
        modelled = MIN_TEMPERATURE <= self.temperature < math.inf
        _check("temperature", self.temperature, modelled, f"{MIN_TEMPERATURE:g} or more")
        _check("max_logprob_gap", self.max_logprob_gap, self.max_logprob_gap > 0, "above 0")
        _check("max_skips_in_a_row", self.max_skips_in_a_row, self.max_skips_in_a_row > 0, "1 or more")

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.mini_batches

    def learning_rate_at(self, update: int) -> float:
        """Of the update after `update` others."""
        warm = min(1.0, (update + 1) / self.warmup_updates) if self.warmup_updates else 1.0
        rate = self.learning_rate
        if self.final_learning_rate is not None:
            rate += (self.final_learning_rate - rate) * min(1.0, update / self.total_updates)
        return rate * warm


def _check(key: str, value: object, holds: bool, accepted: str) -> None:
    if not holds:
        raise ConfigError(f"trainer settings: {key} is {value}; accepted: {accepted}")
