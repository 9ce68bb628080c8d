"""A trajectory as other trainers know it: one prompt, and one completion in which the environment's words are masked.

True of it: prompt and completion joined are exactly the ids that the engine had before it at the end of the episode,
and the mask is 1 exactly where a token was sampled that may be trained on. A trajectory with more than one token sequence (a tree, a
rewritten history) has no such form and is refused; the package's own trainer takes it.
"""

import msgspec

from rollwright.training.rows import NotTrainable
from rollwright.trajectory import NO_TEMPERATURE, Trajectory, samples


class Completion(msgspec.Struct, frozen=True):
    """One episode; `ids`, `mask`, `logprobs` and `versions` have the same length."""

    rollout_id: str
    group_id: str
    prompt: list[int]
    """Up to where the first sampled token stands."""
    ids: list[int]
    """Everything from there on: sampled tokens, and what the environment put between them."""
    mask: list[int]
    """1 where the token was sampled, and is in the loss."""
    logprobs: list[float]
    """As sampled; 0 where nothing was."""
    versions: list[int]
    """Of the policy, for each token; -1 where nothing was sampled."""
    reward: float
    """Task reward and penalties together: these trainers know one number."""
    turns: int
    temperatures: frozenset[float]
    """That the tokens in the loss were drawn at; empty: nobody recorded it."""


def completion_of(trajectory: Trajectory, *, own_sampling: bool = False) -> Completion:
    """Raises `NotTrainable` for what cannot be told as one completion. `own_sampling`: the trainer itself has said how to
    sample and answers for it, so no token is left out for how it was drawn."""
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
