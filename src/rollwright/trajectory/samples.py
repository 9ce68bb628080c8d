"""Training rows of a trajectory: flattened token ids with loss mask, log-probabilities, versions and weights.

`samples` joins the turns of a token sequence into one row; `turn_samples` gives one row per turn with the prompt exactly
as the model saw it, and costs more tokens. Always true of both: a sampled token has mask 1 in exactly one row, with its
turn's weight, unless its turn is excluded from the loss (`Trajectory.untrained`); a token that was not sampled has mask 0.
"""

from collections.abc import Sequence

import msgspec

from rollwright.trajectory.arrays import Floats, TokenIds, floats, token_ids
from rollwright.trajectory.forest import Trajectory, full_prompt, sequence, turn_weights
from rollwright.trajectory.turn import Turn, expand_versions

NO_VERSION = -1
"""Version of a token that was not sampled."""

NO_TEMPERATURE = -1.0
"""Temperature of a token that was not sampled, or whose temperature was not recorded."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Position of a turn's sampled ids in a sample."""

    turn: int
    start: int
    stop: int
    trained: bool
    """False if another sample trains this turn, or it is excluded from the loss."""


class Sample(msgspec.Struct, frozen=True):
    """One row of a batch; all arrays have the same length."""

    rollout_id: str
    group_id: str
    token_ids: TokenIds
    mask: bytes
    """Loss mask: 1 for a token that is trained."""
    logprobs: Floats
    """Log-probabilities at sampling time; 0 for tokens that were not sampled."""
    versions: TokenIds
    """Policy version of each token; `NO_VERSION` if it was not sampled."""
    weights: Floats
    """Weight of the token's turn in the tree; 0 where the mask is 0."""
    temperatures: Floats
    """Sampling temperature of each token; `NO_TEMPERATURE` if there is none."""
    spans: tuple[Span, ...]
    """Its turns, in order; per-turn advantages are assigned to these ranges."""


def samples(trajectory: Trajectory) -> list[Sample]:
    """One sample per token sequence that no other sequence extends."""
    turns = trajectory.turns
    continued = {turn.extends for turn in turns}
    weights = turn_weights(turns)
    trained: set[int] = set()
    rows = []
    for turn in turns:
        if turn.id in continued:
            continue
        row = sequence(turns, turn.id)
        fresh = {each.id for each in row} - trained
        trained |= fresh
        rows.append(_join(trajectory, token_ids(), row, fresh, weights))
    return rows


def turn_samples(trajectory: Trajectory) -> list[Sample]:
    """One sample per turn: its full prompt, then its sampled ids."""
    turns = trajectory.turns
    weights = turn_weights(turns)
    rows = []
    for turn in turns:
        prompt = full_prompt(turns, turn.id)
        context = prompt[: len(prompt) - len(turn.prompt_ids)]
        rows.append(_join(trajectory, context, [turn], {turn.id}, weights))
    return rows


def _join(
    trajectory: Trajectory,
    context: TokenIds,
    row: Sequence[Turn],
    trained: set[int],
    weights: Sequence[float],
) -> Sample:
    ids = token_ids(context)
    mask = bytearray(len(context))
    logprobs = floats([0.0]) * len(context)
    versions = token_ids([NO_VERSION]) * len(context)
    token_weights = floats([0.0]) * len(context)
    temperatures = floats([NO_TEMPERATURE]) * len(context)
    spans = []
    for turn in row:
        added, sampled = len(turn.prompt_ids), len(turn.sampled_ids)
        counts = turn.id in trained and trajectory.untrained(turn) is None
        sampling = trajectory.sampling_of(turn)
        temperature = NO_TEMPERATURE if sampling is None else sampling.temperature
        ids += turn.prompt_ids
        spans.append(Span(turn.id, len(ids), len(ids) + sampled, counts))
        ids += turn.sampled_ids
        mask += bytes(added) + bytes([counts]) * sampled
        logprobs += floats([0.0]) * added + turn.logprobs
        versions += token_ids([NO_VERSION]) * added + token_ids(expand_versions(turn.versions))
        token_weights += floats([0.0]) * added + floats([weights[turn.id] if counts else 0.0]) * sampled
        temperatures += floats([NO_TEMPERATURE]) * added + floats([temperature]) * sampled
    return Sample(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        token_ids=ids,
        mask=bytes(mask),
        logprobs=logprobs,
        versions=versions,
        weights=token_weights,
        temperatures=temperatures,
        spans=tuple(spans),
    )
