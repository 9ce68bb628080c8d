"""The report of one training step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from rollwright.training.rows import Row


class Skip(StrEnum):
    """Why an update was skipped. `NOT_FINITE` and `LOGPROB_GAP` indicate a problem; the others do not."""

    EMPTY = "empty batch"
    """The batch has no row with a trained token."""
    NO_ADVANTAGE = "no advantage"
    """All advantages are 0, so there is no gradient."""
    NOT_FINITE = "loss is not finite"
    """The loss or the gradient was infinite or not a number."""
    REMOTE = "skipped by the trainer"
    """A trainer in another process acknowledged the batch without new weights; its own reason is counted."""
    LOGPROB_GAP = "log-probability gap"
    """The engine's log-probabilities and the trainer's differ by more than `max_logprob_gap`."""


@dataclass(frozen=True)
class StepReport:
    """Metrics of one step. Means are over trained tokens unless stated otherwise; values not computed are 0 or `None`."""

    version: int
    """Version of the weights after the step."""
    updates: int = 0
    """Number of optimiser updates."""
    skipped: Skip | None = None
    """Why an update was skipped; `None` if all were made."""
    loss: float | None = None
    """Mean over the updates; `None` if no loss was computed."""
    reward: float | None = None
    """Mean over rollouts, without penalties; `None` for an empty batch."""
    success: float | None = None
    """Mean over the rollouts whose success is known; `None` if there is none."""
    entropy: float = 0.0
    ratio: float = 0.0
    """Mean ratio of the new probability to the one it is clipped against."""
    ratio_max: float = 0.0
    clip_share: float = 0.0
    """Share of tokens whose gradient was clipped to zero."""
    divergence: float | None = None
    """Mean divergence from the base model; `None` without a KL term."""
    gap: float | None = None
    """Mean absolute difference between the engine's and the trainer's log-probabilities before the first update."""
    gap_max: float | None = None
    gap_k3: float | None = None
    """The same difference as a divergence, by the k3 estimator."""
    value_loss: float | None = None
    """Mean loss of the critic's values; `None` without a critic."""
    value_clip_share: float | None = None
    """Share of values whose gradient was clipped to zero."""
    value_explained: float | None = None
    """Share of the variance of returns that the critic's values before the step explain."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Number of trained tokens by their age in versions, relative to the weights before the step."""
    grad_norm: float = 0.0
    """Gradient norm before clipping; mean over the updates."""
    gradient_signal: float | None = None
    """Squared norm of the expected gradient of the first update, by its two halves; may be negative by chance. `None`: not
    measured in this step. Average it over steps before it is divided by the noise."""
    gradient_noise: float | None = None
    """Squared norm of what the first update's gradient differs from it, as expected."""
    learning_rate: float = 0.0
    """Learning rate of the last update."""
    rollouts: int = 0
    rows: int = 0
    silent_groups: float = 0.0
    """Share of the groups whose advantages are all 0, so that nothing is learned from them."""
    rows_without_gradient: int = 0
    """Rows that were not computed, because all their advantages are 0."""
    tokens: int = 0
    """Trained tokens of the batch."""
    computed_tokens: int = 0
    """Tokens that went through the model for gradients, over all epochs, without padding."""
    shared_tokens: int = 0
    """Tokens that did not, because another row has them behind the same prefix."""
    padding_share: float = 0.0
    """Share of padding among the tokens that went through the model."""
    micro_batches: int = 0
    seconds: float = 0.0
    ranks: int = 1
    rank_imbalance: float = 0.0
    """Tokens of the most loaded rank divided by the mean over ranks, minus 1; mean over the updates."""
    rank_waiting_share: float = 0.0
    """Share of the step in which ranks waited for others; mean over ranks."""
    rank_memory_mb: Mapping[int, float] = field(default_factory=dict)
    """Largest resident memory of each rank so far; empty with one rank."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Further figures of a trainer in another process."""

    @property
    def tokens_per_second(self) -> float:
        return self.computed_tokens / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, float | str]:
        """Flat metrics for a writer; values that are `None` are left out."""
        flat = {
            name: value
            for name, value in asdict(self).items()
            if not isinstance(value, Mapping) and value is not None
        }
        flat |= {f"staleness/{versions}": count for versions, count in sorted(self.staleness.items())}
        flat |= {f"rank_memory_mb/{rank}": value for rank, value in sorted(self.rank_memory_mb.items())}
        flat |= {f"trainer/{name}": value for name, value in sorted(self.more.items())}
        return flat | {"tokens_per_second": self.tokens_per_second}


def batch_figures(rows: Sequence[Row]) -> tuple[int, float | None, float | None]:
    """Number of rollouts, mean reward and mean success; a rollout with several rows counts once."""
    rollouts = {row.rollout_id: row for row in rows}.values()
    known = [row.success for row in rollouts if row.success is not None]
    return (
        len(rollouts),
        sum(row.reward for row in rollouts) / len(rollouts) if rollouts else None,
        sum(known) / len(known) if known else None,
    )


def silent_share(rows: Sequence[Row]) -> float:
    """Share of the groups without any advantage."""
    loud: dict[str, bool] = {}
    for row in rows:
        loud[row.group_id] = loud.get(row.group_id, False) or any(row.advantages)
    return 1 - sum(loud.values()) / len(loud) if loud else 0.0
