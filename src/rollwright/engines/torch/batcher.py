"""Continuous batching: calls join and leave between any two steps, and a step samples one token for each running call.

Always true: a call is either waiting, running or ended, and it ends once. An interrupted call waits again, ahead of all later
calls, and keeps its tokens unless it restarts. A log-probability is that of the distribution sampled from, after temperature
and top-p, over the tokens that its output format allows; at temperature 0 this is a point mass on the likeliest token, so it is 0. Used by one thread.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch

from rollwright.engines.base import EngineError, TokenAlternative
from rollwright.engines.torch.call import Counters, GenerationCall
from rollwright.engines.torch.rows import ModelRows


def sample(
    logits: torch.Tensor, temperatures: Sequence[float], top_ps: Sequence[float], draws: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token for each row: the first whose cumulative probability, in the order of ids, exceeds the row's draw.

    `draws`: one number in [0, 1) for each row. A log-probability that is not finite means that the logits were not.
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
    # In double precision, so that rounding of the sum over a large vocabulary does not move a boundary.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    targets = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    found, chosen = tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()
    if any(greedy):
        best, certain = _greedy(logits)
        for row in (row for row, is_greedy in enumerate(greedy) if is_greedy):
            found[row], chosen[row] = best[row], certain[row]
    return found, chosen


def nucleus(logprobs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Log-probabilities restricted to the fewest likeliest tokens that hold `top_p` of the mass, at least one, renormalised."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.double().exp()
    dropped = mass.cumsum(dim=-1) - mass >= top_ps[:, None]
    dropped[:, 0] = False
    cut = torch.zeros_like(dropped).scatter_(1, order, dropped)
    return torch.log_softmax(logprobs.masked_fill(cut, float("-inf")), dim=-1)


def likeliest(
    logits: torch.Tensor, temperature: float, top_p: float, count: int
) -> tuple[TokenAlternative, ...]:
    """The likeliest tokens of one row in the distribution that is sampled from, the likeliest first."""
    if temperature == 0:
        (best,), (certain,) = _greedy(logits.float()[None])
        return (TokenAlternative(best, certain),)
    logprobs = _sampled_from(logits, temperature, top_p)
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
    found = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(TokenAlternative(id, value) for id, value in found if math.isfinite(value))


def entropy(logits: torch.Tensor, temperature: float, top_p: float) -> float:
    """Entropy of one row of the distribution that is sampled from, in nats."""
    if temperature == 0:
        return 0.0
    return float(torch.special.entr(_sampled_from(logits, temperature, top_p).exp()).sum())


def _sampled_from(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    logprobs = torch.log_softmax(logits.float()[None] / temperature, dim=-1)
    if top_p < 1:
        logprobs = nucleus(logprobs, torch.tensor([top_p], dtype=torch.float64, device=logits.device))
    return logprobs[0]


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    top, tokens = logits.max(dim=-1)
    # 0 for a finite logit, NaN otherwise
    return tokens.tolist(), (top - top).tolist()


def _constrain(calls: Sequence[GenerationCall], logits: torch.Tensor) -> torch.Tensor:
    """The logits without the tokens that the calls' output formats forbid."""
    bound = [row for row, call in enumerate(calls) if call.matcher is not None]
    if not bound:
        return logits
    logits = logits.float().clone()
    for row in bound:
        matcher = calls[row].matcher
        assert matcher is not None
        logits[row].masked_fill_(matcher.forbidden().to(logits.device), float("-inf"))
    return logits


class Batcher:
    """The waiting and the running calls; see the module's docstring for its guarantees."""

    def __init__(self, rows: ModelRows, counters: Counters) -> None:
        self._rows = rows
        self._counters = counters
        self._waiting: deque[GenerationCall] = deque()
        self._running: dict[GenerationCall, None] = {}
        """In the order of admission."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, call: GenerationCall) -> None:
        self._waiting.append(call)

    def step(self, version: int, *, admit: bool = True) -> list[GenerationCall]:
        """Sample one token for every running call; return the calls that ended. Waiting calls join only with `admit`."""
        with torch.inference_mode():
            if admit:
                self._running.update(dict.fromkeys(self._rows.admit(self._waiting)))
            ended = []
            for calls, logits in self._rows.forward():
                self._sample(calls, logits, version)
                ended += [call for call in calls if call.ended]
            for call in ended:
                self._leave(call)
        self._counters.steps += 1
        return ended

    def drop_cancelled(self) -> int:
        """Remove the cancelled calls; return their number."""
        running = [call for call in self._running if call.cancelled]
        with torch.inference_mode():
            for call in running:
                self._leave(call)
        before = len(self._waiting)
        self._waiting = deque(call for call in self._waiting if not call.cancelled)
        return len(running) + before - len(self._waiting)

    def interrupt(self, *, restart: bool) -> None:
        """Move all running calls back to waiting. Keys and values computed so far are dropped, because the weights change."""
        running = list(self._running)
        self._running.clear()
        self._rows.clear()
        self._waiting.extendleft(reversed(running))
        for call in running:
            if restart:
                self._counters.restarted_calls += 1
                self._counters.discarded_tokens += call.restart()
            else:
                self._counters.resumed_calls += 1

    def remove_all(self, *, waiting: bool) -> list[GenerationCall]:
        """Remove and return all running calls, and with `waiting` the waiting ones, too."""
        calls = [*self._running, *(self._waiting if waiting else ())]
        self._running.clear()
        self._rows.clear()
        if waiting:
            self._waiting.clear()
        return calls

    def _leave(self, call: GenerationCall) -> None:
        del self._running[call]
        self._rows.release(call)

    def _sample(self, calls: list[GenerationCall], logits: torch.Tensor, version: int) -> None:
        logits = _constrain(calls, logits)
        tokens, logprobs = sample(
            logits,
            [call.temperature for call in calls],
            [call.top_p for call in calls],
            [call.draw() for call in calls],
        )
        for row, (call, token, logprob) in enumerate(zip(calls, tokens, logprobs, strict=True)):
            if call.matcher is not None and (why := call.matcher.error):
                call.error = EngineError(f"the output format cannot be continued: {why}")
            elif math.isfinite(logprob):
                if call.top_logprobs:
                    told = likeliest(logits[row], call.temperature, call.top_p, call.top_logprobs)
                    call.alternatives.append(told)
                    if not call.logprobs:
                        call.entropy = entropy(logits[row], call.temperature, call.top_p)
                call.append(token, logprob, version)
                self._counters.sampled_tokens += 1
            else:
                call.error = EngineError(
                    f"weights of version {version} gave logits that are not finite; nothing can be sampled"
                )
