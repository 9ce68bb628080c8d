"""The coefficient of each trained token in the loss of the batch.

Always true: the loss of a batch is the sum over its tokens of coefficient × loss. Coefficients follow from weights and
lengths of the whole batch, so that the gradient of a batch is the sum of the gradients of its parts.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rollwright.training.micro_batches import PackedRow
from rollwright.training.settings import Aggregation, LossSettings


def token_coefficients(rows: Sequence[PackedRow], settings: LossSettings) -> list[Tensor]:
    """For each row, the coefficients of its trained tokens in the loss of the batch."""
    tokens: dict[str, float] = {}
    for row in rows:
        tokens[row.rollout_id] = tokens.get(row.rollout_id, 0.0) + float(row.weights.sum(dtype=torch.float64))
    match settings.aggregation:
        case Aggregation.TOKEN_MEAN:
            divisors = dict.fromkeys(tokens, math.fsum(tokens.values()))
        case Aggregation.SEQUENCE_MEAN:
            divisors = {rollout: own * len(tokens) for rollout, own in tokens.items()}
        case Aggregation.CONSTANT:
            divisors = dict.fromkeys(tokens, float(settings.constant_length * len(tokens)))
        case Aggregation.BATCH_MEAN:
            divisors = dict.fromkeys(tokens, float(len(tokens)))
        case Aggregation.BATCH_SUM:
            divisors = dict.fromkeys(tokens, 1.0)
    return [row.weights / divisors[row.rollout_id] for row in rows]
