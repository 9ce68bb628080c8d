"""One call of `generate` while a torch policy serves it, and the policy's counters.

Always true of a call: `tokens` holds the prompt followed by the sampled ids, so nothing is encoded again; it has one
log-probability and one version stamp for each sampled id, also after an interruption.
"""

import asyncio
from dataclasses import dataclass, field

from rollwright.engines.base import EngineError, Renderer, TokenAlternative
from rollwright.engines.torch.constraints import OutputMatcher
from rollwright.rng import uniform
from rollwright.trajectory import FinishReason, Floats, TokenIds, VersionRun, floats


@dataclass
class Counters:
    """Totals of a torch policy since it was made."""

    calls: int = 0
    """Calls received; those not in `completed`, `failed` or `cancelled` are waiting or running."""
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    """Steps; each gives every running call one more token, or reads one more part of its prompt."""
    passes: int = 0
    """Forward passes; a step takes several when new prompts have different lengths."""
    sampled_tokens: int = 0
    fed_tokens: int = 0
    """Tokens of prompts and samples fed to the model."""
    reused_tokens: int = 0
    """Tokens not fed, because their keys and values were cached."""
    updates: int = 0
    """Weight updates that took effect."""
    resumed_calls: int = 0
    """Calls that continued under new weights."""
    restarted_calls: int = 0
    """Calls that restarted under new weights."""
    discarded_tokens: int = 0
    """Tokens that restarted calls had sampled before."""


@dataclass(eq=False)
class GenerationCall:
    """Owned by the worker's thread from submission until `done` is set, except for `cancelled`."""

    tokens: TokenIds
    """The prompt's ids, then the sampled ones."""
    prompt_tokens: int
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    noise: int
    """The key of its draws, together with the position."""
    renderer: Renderer
    done: asyncio.Future[None]
    matcher: OutputMatcher | None = None
    """Restricts the tokens to those of an output format; `None`: all may come."""
    top_logprobs: int = 0
    """Likeliest tokens to tell at each place."""
    logprobs: Floats = field(default_factory=floats)
    alternatives: list[tuple[TokenAlternative, ...]] = field(default_factory=list)
    """Of each sampled token, if they were asked for."""
    entropy: float | None = None
    """Of the distribution of the first token, if alternatives were asked for."""
    versions: list[VersionRun] = field(default_factory=list)
    finish: FinishReason | None = None
    """`None` while it is being served."""
    error: EngineError | None = None
    cancelled: bool = False
    """Set when the caller stopped waiting; the call leaves before the next step."""

    @property
    def sampled(self) -> TokenIds:
        return self.tokens[self.prompt_tokens :]

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def draw(self) -> float:
        """The draw of the next token: keyed by the call and the position alone, however it is batched."""
        return uniform(self.noise, len(self.logprobs))

    def append(self, token: int, logprob: float, version: int) -> None:
        """Append a sampled token; set `finish` if it is the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.matcher is not None:
            self.matcher.consume(token)
        if self.versions and self.versions[-1].version == version:
            self.versions[-1] = VersionRun(version, self.versions[-1].count + 1)
        else:
            self.versions.append(VersionRun(version, 1))
        if token in self.renderer.stop_ids or (self.stop and self._has_stop_string()):
            self.finish = FinishReason.STOP
        elif len(self.logprobs) >= self.max_tokens:
            self.finish = FinishReason.LENGTH

    def restart(self) -> int:
        """Discard the sampled tokens; return their number."""
        lost = len(self.logprobs)
        del self.tokens[self.prompt_tokens :]
        self.logprobs = floats()
        self.alternatives = []
        self.versions = []
        if self.matcher is not None:
            self.matcher.reset()
        return lost

    def text(self) -> str:
        """The text up to a stop string; the ids include the stop string."""
        text = self.renderer.decode(self.sampled)
        places = [place for each in self.stop if (place := text.find(each)) >= 0]
        return text[: min(places)] if places else text

    def _has_stop_string(self) -> bool:
        # A token is at least one byte, so as many newest tokens as the longest stop string has bytes are enough. A few more
        # are decoded, because a tokenizer may decode the first token of a sequence differently.
        window = max(len(each.encode()) for each in self.stop) + 4
        newest = self.tokens[max(self.prompt_tokens, len(self.tokens) - window) :]
        text = self.renderer.decode(newest)
        return any(each in text for each in self.stop)
