"""Flattened token rows with per-token advantages.

Always true: every sampled token of every admitted trajectory has mask 1 in exactly one row in either view, so the loss does
not depend on the view. Failed episodes, episodes without a token and duplicates give no row (`advantages.left_out` counts
them). Ids that no engine sampled are refused, and so are rollouts sampled from a distribution that the trainer does not
compute. Single turns from such a distribution have mask 0 (`untrained_turns` counts them).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from rollwright.errors import ConfigError, RollwrightError
from rollwright.training.advantages.base import Advantage, Groups, admitted
from rollwright.training.advantages.values import ValueBased
from rollwright.trajectory import (
    MIN_TEMPERATURE,
    NO_TEMPERATURE,
    Floats,
    Sample,
    TokenIds,
    Trajectory,
    floats,
    samples,
    turn_samples,
)

View = Literal["paths", "turns"]
"""`paths`: one row for each token sequence; `turns`: one for each turn, which costs more tokens."""


TURNS = "turns: "
"""Prefix of reasons that concern single turns instead of whole trajectories."""


class NotTrainable(RollwrightError):
    """A trajectory cannot be trained on; the message names it, the reason, and what to use instead."""


class Row(msgspec.Struct, frozen=True):
    """One token sequence; all arrays have the same length."""

    rollout_id: str
    group_id: str
    token_ids: TokenIds
    mask: bytes
    """1 where the token's loss counts."""
    logprobs: Floats
    """Log-probabilities as the engine sampled; 0 where nothing was sampled."""
    versions: TokenIds
    """Policy version of each token; `NO_VERSION` where nothing was sampled."""
    weights: Floats
    """Weight of the token's turn in its tree; 0 where the mask is 0."""
    advantages: Floats
    """Advantage of the token's turn; 0 where the mask is 0."""
    temperatures: Floats | None = None
    """Sampling temperature of each token; `NO_TEMPERATURE` where nothing was sampled or it is unknown. `None`: unknown
    for all tokens, so the trainer's own temperature applies."""
    reward: float = 0.0
    """Reward of the whole rollout, for the report; equal in all rows of a rollout."""
    success: float | None = None
    """Share of the rollout's leaves that solved the task; `None` if the environment does not report it."""
    values: Floats | None = None
    """The critic's value of the state before each token, before the step; 0 where the mask is 0. `None`: no critic."""
    returns: Floats | None = None
    """Target of that value."""


def build_rows(
    groups: Groups,
    advantage: Advantage,
    *,
    view: View = "paths",
    values: Callable[[Sequence[Row]], Sequence[Floats]] | None = None,
) -> list[Row]:
    """The rows of all admitted trajectories, in order. Raises `NotTrainable` for ids that no engine sampled, and for a
    rollout whose sampling is not modelled.

    `values`: a critic; gives for each row the value of the state before each token. The advantage has to be `ValueBased`.
    """
    for group in groups:
        for trajectory in group:
            _refuse_text(trajectory)
            _refuse_sampling(trajectory)
    walk = samples if view == "paths" else turn_samples
    found = [
        _Sampled(group, member, trajectory, sample)
        for group, (members, kept) in enumerate(zip(groups, admitted(groups), strict=True))
        for member, (trajectory, counts) in enumerate(zip(members, kept, strict=True))
        if counts
        for sample in walk(trajectory)
        if any(sample.mask)
    ]
    if values is not None:
        return _valued_rows(groups, advantage, found, values)
    advantages: Sequence[Sequence[TurnNumbers]] = advantage(groups)
    return [each.row(advantages[each.group][each.member]) for each in found]


TurnNumbers: TypeAlias = Sequence[float] | Sequence[Sequence[float]]
"""One number for each turn of a trajectory, or one for each token of each turn."""


class _Sampled(NamedTuple):
    """A sample, and where its trajectory stands in the batch."""

    group: int
    member: int
    trajectory: Trajectory
    sample: Sample

    def row(self, advantages: TurnNumbers) -> Row:
        return _row(self.trajectory, self.sample, advantages)


def _valued_rows(
    groups: Groups,
    advantage: Advantage,
    found: Sequence[_Sampled],
    values: Callable[[Sequence[Row]], Sequence[Floats]],
) -> list[Row]:
    """Rows with a critic's values, and the advantages and returns that follow from them."""
    if not isinstance(advantage, ValueBased):
        raise ConfigError("training.advantage: uses no values of a critic; `gae` does")
    rows = [each.row([0.0] * len(each.trajectory.turns)) for each in found]
    given = values(rows) if rows else []
    by_turn: list[list[list[Sequence[float]]]] = [
        [[()] * len(trajectory.turns) for trajectory in group] for group in groups
    ]
    for each, own in zip(found, given, strict=True):
        for span in each.sample.spans:
            if span.trained:
                by_turn[each.group][each.member][span.turn] = own[span.start : span.stop]
    estimate = advantage.estimate(groups, by_turn)
    return [
        msgspec.structs.replace(
            row,
            values=own,
            advantages=_spread(each.sample, estimate.advantages[each.group][each.member]),
            returns=_spread(each.sample, estimate.returns[each.group][each.member]),
        )
        for row, own, each in zip(rows, given, found, strict=True)
    ]


def _refuse_text(trajectory: Trajectory) -> None:
    if trajectory.error is None and any(
        not turn.exact and turn.filtered is None for turn in trajectory.turns
    ):
        raise NotTrainable(
            f"rollout {trajectory.rollout_id} is not trainable: {trajectory.not_trainable}; "
            "use an engine that returns token ids and log-probabilities"
        )


def _refuse_sampling(trajectory: Trajectory) -> None:
    """Checks the sampling of the rollout. A single turn with other sampling is masked and counted instead."""
    sampling = trajectory.sampling
    if trajectory.error is None and sampling is not None and (why := sampling.not_modelled) is not None:
        raise NotTrainable(
            f"rollout {trajectory.rollout_id} is not trainable: it was {why}; only the temperature is modelled, from "
            f"{MIN_TEMPERATURE:g} up: play with top_p 1 and nothing else that cuts or bends the distribution"
        )


def untrained_turns(groups: Groups) -> dict[str, int]:
    """Number of turns of admitted trajectories that are masked for another reason than a filter, by reason."""
    found: Counter[str] = Counter()
    for group, kept in zip(groups, admitted(groups), strict=True):
        for trajectory, counts in zip(group, kept, strict=True):
            if counts:
                found.update(trajectory.never_trained())
    return {f"{TURNS}{reason}": count for reason, count in found.items()}


def _row(trajectory: Trajectory, sample: Sample, own: TurnNumbers) -> Row:
    if sample.mask[0]:
        raise NotTrainable(
            f"rollout {trajectory.rollout_id} is not trainable: a sequence begins with a sampled token; "
            "a prompt needs at least one token"
        )
    return Row(
        rollout_id=sample.rollout_id,
        group_id=sample.group_id,
        token_ids=sample.token_ids,
        mask=sample.mask,
        logprobs=sample.logprobs,
        versions=sample.versions,
        weights=sample.weights,
        advantages=_spread(sample, own),
        temperatures=None if max(sample.temperatures) == NO_TEMPERATURE else sample.temperatures,
        reward=trajectory.reward,
        success=trajectory.success_share,
    )


def _spread(sample: Sample, own: TurnNumbers) -> Floats:
    """Numbers of turns at the places of their trained tokens; 0 elsewhere."""
    found = floats([0.0]) * len(sample.mask)
    for span in sample.spans:
        if span.trained:
            value = own[span.turn]
            found[span.start : span.stop] = (
                floats([value]) * (span.stop - span.start)
                if isinstance(value, float | int)
                else floats(value)
            )
    return found
