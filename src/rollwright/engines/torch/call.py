"""What a torch policy has done so far.

One call of `generate` while it is being served.

What is true of it: `tokens` are the prompt and then what was sampled, so nothing is ever encoded again; it has as
many log-probabilities and version stamps as sampled ids, also after it was interrupted.
"""

import asyncio
from dataclasses import dataclass, field

from rollwright.engines.base import EngineError, Renderer
from rollwright.rng import uniform
from rollwright.trajectory import FinishReason, Floats, TokenIds, VersionRun, floats


@dataclass
class Counters:
    """Only grows."""

    calls: int = 0
    """All that came; those neither in `completed`, `failed` nor `cancelled` are still here."""
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    """Times that every call which was being served got one more token, or one more part of its prompt read."""
    passes: int = 0
    """Passes through the model; a step takes several when prompts of different lengths come in."""
    sampled_tokens: int = 0
    fed_tokens: int = 0
    """Tokens of prompts and samples that went through the model."""
    reused_tokens: int = 0
    """Tokens that did not have to, because their keys and values were at hand."""
    updates: int = 0
    """Weight updates that took effect."""
    resumed_calls: int = 0
    """Calls that went on under new weights."""
    restarted_calls: int = 0
    """Calls that began anew under new weights."""
    discarded_tokens: int = 0
    """Tokens that restarted calls had sampled."""


@dataclass(eq=False)
class Call:
    """Belongs to the worker's thread from when it is handed over until `done` is set; only `cancelled` is not."""

    tokens: TokenIds
    """The prompt's ids, then the sampled ones."""
    prompt_tokens: int
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    noise: int
    """What its draws are keyed by, beside the position."""
    renderer: Renderer
    done: asyncio.Future[None]
    logprobs: Floats = field(default_factory=floats)
    versions: list[VersionRun] = field(default_factory=list)
    finish: FinishReason | None = None
    """`None` while it is being served."""
    error: EngineError | None = None
    cancelled: bool = False
    """Set when nobody waits for it any more; it leaves before the next step."""

    @property
    def sampled(self) -> TokenIds:
        return self.tokens[self.prompt_tokens :]

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def draw(self) -> float:
        """The luck of its next token: of the call's key and the position alone, however it is batched."""
        return uniform(self.noise, len(self.logprobs))

    def take(self, token: int, logprob: float, version: int) -> None:
        """One more sampled token; sets `finish` when it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1].version == version:
            self.versions[-1] = VersionRun(version, self.versions[-1].count + 1)
        else:
            self.versions.append(VersionRun(version, 1))
        if token in self.renderer.stop_ids or (self.stop and self._says_stop()):
            self.finish = FinishReason.STOP
        elif len(self.logprobs) >= self.max_tokens:
            self.finish = FinishReason.LENGTH

    def restart(self) -> int:
        """Forgets what was sampled; returns how many tokens that were."""
        lost = len(self.logprobs)
        del self.tokens[self.prompt_tokens :]
        self.logprobs = floats()
        self.versions = []
        return lost

    def text(self) -> str:
        """Up to where a stop string begins; the ids have the whole of it."""
        text = self.renderer.decode(self.sampled)
        places = [place for each in self.stop if (place := text.find(each)) >= 0]
        return text[: min(places)] if places else text

    def _says_stop(self) -> bool:
        # a token is a byte at least, so the newest tokens that could make up a stop string are enough to look at;
        # some more, because a tokenizer may treat the first of what it decodes differently
        window = max(len(each.encode()) for each in self.stop) + 4
        newest = self.tokens[max(self.prompt_tokens, len(self.tokens) - window) :]
        text = self.renderer.decode(newest)
        return any(each in text for each in self.stop)
