"""From logits and luck to tokens and their log-probabilities, for a whole batch at once.

The log-probability is that of the distribution sampled from: after temperature and top-p. At temperature 0 that is
a point mass on the likeliest token, so it is 0.
"""

from collections.abc import Sequence

import torch


def sample(
    logits: torch.Tensor, temperatures: Sequence[float], top_ps: Sequence[float], draws: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token for each row: the first whose cumulative probability, in the order of ids, exceeds the row's draw.

    A token takes one draw in [0, 1). A log-probability that is not finite says that the logits were not.
    """
    logits = logits.float()
    greedy = [temperature == 0 for temperature in temperatures]
    if all(greedy):
        return _greedy(logits)
    heat = torch.tensor([temperature or 1.0 for temperature in temperatures], device=logits.device)
    logprobs = torch.log_softmax(logits / heat[:, None], dim=-1)
    if narrow := [row for row, top_p in enumerate(top_ps) if top_p < 1 and not greedy[row]]:
        rows = torch.tensor(narrow, device=logits.device)
        limits = torch.tensor([top_ps[row] for row in narrow], dtype=torch.float64, device=logits.device)
        logprobs[rows] = nucleus(logprobs[rows], limits)
    # in double precision, so that the sum over a large vocabulary does not move a boundary
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    luck = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, luck, right=True).clamp_(max=logits.shape[-1] - 1)
    found, chosen = tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()
    if any(greedy):
        best, certain = _greedy(logits)
        for row in (row for row, is_greedy in enumerate(greedy) if is_greedy):
            found[row], chosen[row] = best[row], certain[row]
    return found, chosen


def nucleus(logprobs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Only the fewest likeliest tokens that hold `top_p` of the probability, renormalised; the likeliest always."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.double().exp()
    dropped = mass.cumsum(dim=-1) - mass >= top_ps[:, None]
    dropped[:, 0] = False
    cut = torch.zeros_like(dropped).scatter_(1, order, dropped)
    return torch.log_softmax(logprobs.masked_fill(cut, float("-inf")), dim=-1)


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    top, tokens = logits.max(dim=-1)
    # 0 where the logit is finite, and not a number where it is not
    return tokens.tolist(), (top - top).tolist()
