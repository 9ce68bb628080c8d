"""Conversion of a trajectory to one prompt and one completion, in which the environment's tokens are masked.

Always true: prompt and completion together are the engine's whole token sequence at the end of the episode. The mask is 1
exactly for sampled tokens that may be trained on. A trajectory with more than one token sequence (a tree, a rewritten
history) cannot be converted and is refused; the package's own trainer accepts it.
"""

import msgspec

from rollwright.training.rows import NotTrainable
from rollwright.trajectory import NO_TEMPERATURE, Trajectory, samples


class Completion(msgspec.Struct, frozen=True):
    """One episode; `ids`, `mask`, `logprobs` and `versions` have the same length."""

    rollout_id: str
    group_id: str
    prompt: list[int]
    """Ids before the first sampled token."""
    ids: list[int]
    """All following ids: sampled tokens, and the environment's tokens between them."""
    mask: list[int]
    """1 where the token was sampled and is in the loss."""
    logprobs: list[float]
    """Log-probabilities as sampled; 0 for other tokens."""
    versions: list[int]
    """Policy version of each token; -1 where nothing was sampled."""
    reward: float
    """Sum of task reward and penalties: these trainers accept one number."""
    turns: int
    temperatures: frozenset[float]
    """Sampling temperatures of the tokens in the loss; empty: not recorded."""


def completion_of(trajectory: Trajectory, *, own_sampling: bool = False) -> Completion:
    """Converts an episode; raises `NotTrainable` if it is not one token sequence.

    `own_sampling`: the other trainer chose the sampling parameters, so no token is masked because of them.
    """
    if own_sampling:
        turns = [msgspec.structs.replace(turn, sampling=None) for turn in trajectory.turns]
        trajectory = msgspec.structs.replace(trajectory, turns=turns, sampling=None)
    if (reason := trajectory.not_trainable) is not None:
        raise NotTrainable(f"rollout {trajectory.rollout_id} is not trainable: {reason}")
    rows = samples(trajectory)
    if len(rows) != 1:
        raise NotTrainable(
            f"rollout {trajectory.rollout_id} has {len(rows)} token sequences, but other trainers take one; "
            "use `strategy.kind: chain` and `agent.history.mode: whole`, or rollwright's own trainer"
        )
    row = rows[0]
    start = row.mask.index(1)
    return Completion(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        prompt=row.token_ids[:start].tolist(),
        ids=row.token_ids[start:].tolist(),
        mask=list(row.mask[start:]),
        logprobs=row.logprobs[start:].tolist(),
        versions=row.versions[start:].tolist(),
        reward=trajectory.score,
        turns=len(trajectory.turns),
        temperatures=frozenset(
            each
            for each, trained in zip(row.temperatures, row.mask, strict=True)
            if trained and each != NO_TEMPERATURE
        ),
    )
