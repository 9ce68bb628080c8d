"""What a step says of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from rollwright.training.rows import Row


class Skip(StrEnum):
    """Why no update was made of a batch. The ones after NO_ADVANTAGE say that something is wrong."""

    EMPTY = "empty batch"
    """No row, or none with a trained token."""
    NO_ADVANTAGE = "no advantage"
    """Nothing in it was better or worse than anything else, so there is no gradient."""
    NOT_FINITE = "loss is not finite"
    """The loss or the gradient was infinite or not a number."""
    LOGPROB_GAP = "log-probability gap"
    """The engine's log-probabilities and the trainer's differ by more than `max_logprob_gap`."""


@dataclass(frozen=True)
class StepReport:
    """One batch. Means are over trained tokens unless said otherwise; what was not computed is 0 or `None`."""

    version: int
    """Of the weights after the step."""
    updates: int = 0
    """Optimiser updates that were made."""
    skipped: Skip | None = None
    """Why an update was left out; `None` when all were made."""
    loss: float | None = None
    """Mean over the updates; `None` when none got as far."""
    reward: float | None = None
    """Mean over rollouts, without penalties; `None` for an empty batch."""
    success: float | None = None
    """Share of the rollouts of which that is known; `None` when of none."""
    entropy: float = 0.0
    ratio: float = 0.0
    """Of the new probability to the one it is clipped against."""
    ratio_max: float = 0.0
    clip_share: float = 0.0
    """Tokens whose gradient the clip took away."""
    divergence: float | None = None
    """From the base model; `None` without a KL term."""
    gap: float | None = None
    """Mean distance between the engine's log-probabilities and the trainer's, before the first update."""
    gap_max: float | None = None
    gap_k3: float | None = None
    """The same as a divergence, by the k3 estimator."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Trained tokens by how many versions older they are than the weights before the step."""
    grad_norm: float = 0.0
    """Before clipping; mean over the updates."""
    learning_rate: float = 0.0
    """Of the last update."""
    rollouts: int = 0
    rows: int = 0
    rows_without_gradient: int = 0
    """Not computed, because no token of theirs has an advantage."""
    tokens: int = 0
    """Trained tokens of the batch."""
    computed_tokens: int = 0
    """That went through the model for gradients, over all epochs, without padding."""
    padding_share: float = 0.0
    """Padding among all that went through the model."""
    micro_batches: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.computed_tokens / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, float | str]:
        """Flat, for a writer: staleness by its key, nothing for what is `None`."""
        flat = {
            name: value for name, value in asdict(self).items() if name != "staleness" and value is not None
        }
        flat |= {f"staleness/{versions}": count for versions, count in sorted(self.staleness.items())}
        return flat | {"tokens_per_second": self.tokens_per_second}


def batch_figures(rows: Sequence[Row]) -> tuple[int, float | None, float | None]:
    """Rollouts, mean reward and share of success; a rollout counts once, however many rows it has."""
    rollouts = {row.rollout_id: row for row in rows}.values()
    known = [row.success for row in rollouts if row.success is not None]
    return (
        len(rollouts),
        sum(row.reward for row in rollouts) / len(rollouts) if rollouts else None,
        sum(known) / len(known) if known else None,
    )
