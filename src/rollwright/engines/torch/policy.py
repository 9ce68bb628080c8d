"""A policy that runs a transformers model in this process: exact ids and log-probabilities, weight updates between tokens.

Always true:
- Ids, log-probabilities and version stamps are those of the tokens as they were sampled from the distribution that `Sampling`
  describes.
- The draw of a token depends on its call's key and its position alone. With `batch_invariant` so do its logits, to the bit;
  without it, other calls in the batch change them by rounding alone.
- A weight update drops no call. A call that continues under new weights is computed again from the prompt on: keys and values
  of other weights are never used, so a teacher-forced pass with the stamped version gives the same log-probabilities.
- The event loop never waits for the model.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from rollwright.engines.base import (
    Capabilities,
    EngineError,
    Generation,
    OutputFormat,
    Prompt,
    Renderer,
    Sampling,
    UpdateMode,
    Weights,
)
from rollwright.engines.settings import TorchPolicyConfig, TorchServingConfig
from rollwright.engines.torch.batcher import Batcher
from rollwright.engines.torch.call import Counters, GenerationCall
from rollwright.engines.torch.constraints import OutputCompiler, is_available
from rollwright.engines.torch.kv_cache import use_grouped_attention
from rollwright.engines.torch.prefixes import same_start
from rollwright.engines.torch.rows import LoneRows, ModelRows, SharedRows
from rollwright.engines.torch.worker import Update, Worker, read_weights
from rollwright.errors import ConfigError
from rollwright.forks import bind_to_process
from rollwright.hardware import choose_batch, choose_dtype
from rollwright.rng import digest
from rollwright.trajectory import FinishReason

TOKENS_PER_STEP = 2048
"""Prompt tokens fed in one step: enough to fill a forward pass, few enough that running calls do not wait long."""


class TorchPolicy:
    """See the module's docstring for its guarantees. The policy takes ownership of the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        renderer: Renderer,
        settings: TorchServingConfig | None = None,
        *,
        tokens_per_step: int = TOKENS_PER_STEP,
        cache_bytes: int | None = None,
        version: int = 0,
    ) -> None:
        """`settings.prefix_cache_mb` is ignored with `batch_invariant`. `cache_bytes`: memory for keys and values of running
        calls; a call that does not fit waits, and the prefix cache is never larger. `None`: no limit. `version`: of the
        weights that the model has now."""
        settings = settings or TorchServingConfig()
        if tokens_per_step < 1:
            raise ConfigError(f"tokens_per_step: {tokens_per_step} is too few; accepted: 1 or more")
        bind_to_process(self)  # a forked child does not have its thread
        self.renderer = renderer
        self.counters = Counters()
        self._model = model.train(False)
        use_grouped_attention(model)
        rows: ModelRows
        if settings.batch_invariant:
            rows = LoneRows(
                model,
                self.counters,
                max_rows=choose_batch(settings.max_batch),
                tokens_per_step=tokens_per_step,
                cache_bytes=cache_bytes,
            )
        else:
            rows = SharedRows(
                model,
                self.counters,
                max_rows=choose_batch(settings.max_batch),
                tokens_per_step=tokens_per_step,
                prefix_bytes=min(settings.prefix_cache_mb * 1_000_000, cache_bytes or sys.maxsize),
                cache_bytes=cache_bytes,
            )
        self._worker = Worker(model, Batcher(rows, self.counters), self.counters, version)
        self._vocabulary_size: int = model.config.vocab_size
        self._max_length: int | None = getattr(model.config, "max_position_embeddings", None)
        self._outputs = OutputCompiler(renderer, self._vocabulary_size)

    @property
    def constrains_output(self) -> bool:
        """Whether forced tool calls and JSON formats are enforced: with the extra `constrained`."""
        return is_available()

    def check_output(self, output: OutputFormat) -> None:
        """Raises a `RollwrightError` for a format that cannot be enforced; takes as long as compiling its schema."""
        self._outputs.matcher(output)

    @property
    def version(self) -> int:
        return self._worker.version

    @property
    def pressure(self) -> int:
        """Always 0: a call that does not fit waits and is never refused."""
        return 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        call = self._call(prompt, sampling)
        if (
            sampling.output is not None
        ):  # in a thread: compiling a schema takes milliseconds, a large one more
            call.matcher = await asyncio.to_thread(self._outputs.matcher, sampling.output)
        self._worker.submit(call)
        try:
            await call.done
        except asyncio.CancelledError:
            self._worker.cancel(call)
            raise
        sampled = call.sampled
        return Generation(
            text=call.text(),
            sampled_ids=sampled,
            logprobs=call.logprobs,
            versions=tuple(call.versions),
            finish=call.finish or FinishReason.ABORT,
            prompt_tokens=call.prompt_tokens,
            completion_tokens=len(sampled),
            alternatives=tuple(call.alternatives),
            entropy=call.entropy,
        )

    async def update_weights(self, weights: Weights, mode: UpdateMode) -> None:
        """Weights of another model, or a folder with the wrong checksum, raise an error and change nothing."""
        tensors = await asyncio.to_thread(read_weights, self._model, weights)
        update = Update(tensors, weights.version, mode, asyncio.get_running_loop().create_future())
        self._worker.update(update)
        try:
            await asyncio.shield(update.done)
        except asyncio.CancelledError:
            if not self._worker.withdraw(update):
                await asyncio.wait([update.done])  # the caller may change the tensors after this
            raise

    async def probe(self) -> Capabilities:
        return Capabilities(
            engine=f"torch {torch.__version__}, transformers {transformers.__version__}",
            model=self._model.config.name_or_path or self._model.config.model_type,
            token_ids=True,
            logprobs=True,
            update_modes=tuple(UpdateMode),
        )

    async def close(self) -> None:
        """End the thread; running calls end with an `EngineError`. A later call starts a new thread."""
        await asyncio.to_thread(self._worker.close)

    def _call(self, prompt: Prompt, sampling: Sampling) -> GenerationCall:
        _check(sampling)
        ids = prompt.ids
        if not ids:
            raise EngineError("the prompt has no token ids, and a model in this process accepts nothing else")
        if not 0 <= min(ids) <= max(ids) < self._vocabulary_size:
            raise EngineError(
                f"the prompt has ids from {min(ids)} to {max(ids)}; the model knows 0 to {self._vocabulary_size - 1}:"
                " the renderer belongs to another model"
            )
        room = sampling.max_tokens
        if self._max_length is not None:
            room = min(room, self._max_length - len(ids))
            if room < 1:
                raise EngineError(
                    f"the prompt has {len(ids)} ids, which leaves no room in the model's {self._max_length}"
                )
        return GenerationCall(
            tokens=ids[:],
            prompt_tokens=len(ids),
            max_tokens=room,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=sampling.stop,
            noise=digest(*prompt.key, "token"),
            top_logprobs=sampling.top_logprobs,
            renderer=self.renderer,
            done=asyncio.get_running_loop().create_future(),
        )


def load_policy(
    settings: TorchPolicyConfig | str | Path, *, cache_bytes: int | None = None, version: int = 0
) -> TorchPolicy:
    """Load a model and its tokenizer. A folder, the name of a fetched model or `owner/name` on a hub alone stands for the
    default settings."""
    from rollwright.engines.rendering import make_renderer
    from rollwright.models.loading import load_model, load_tokenizer

    if not isinstance(settings, TorchPolicyConfig):
        settings = TorchPolicyConfig(model=str(settings))
    tokenizer: Any = load_tokenizer(settings.model)
    renderer = make_renderer(tokenizer, settings.renderer)
    model = load_model(
        settings.model,
        dtype=choose_dtype(settings.dtype),
        device=settings.device,
        threads=settings.threads,
    )
    return TorchPolicy(model, renderer, settings, cache_bytes=cache_bytes, version=version)


def _check(sampling: Sampling) -> None:
    if not 0 <= sampling.temperature < float("inf"):
        raise ConfigError(f"temperature: {sampling.temperature} is not a temperature; accepted: 0 or more")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"top_p: {sampling.top_p} is not a share; accepted: more than 0, at most 1")
    if sampling.max_tokens < 1:
        raise ConfigError(f"max_tokens: {sampling.max_tokens} is too few; accepted: 1 or more")


@dataclass(frozen=True)
class Divergence:
    """The difference between two generations of the same calls: the measure of the fast mode against `batch_invariant`."""

    calls: int
    diverged: int
    """Calls with different ids; behind the first difference nothing can be compared."""
    tokens: int
    """Compared tokens: those before the first difference of each call."""
    largest_gap: float
    """Largest difference in log-probability over the compared tokens."""

    @property
    def share(self) -> float:
        return self.diverged / self.calls if self.calls else 0.0


def divergence(first: Sequence[Generation], second: Sequence[Generation]) -> Divergence:
    """Compare two lists of generations, call by call."""
    diverged = tokens = 0
    largest = 0.0
    for one, other in zip(first, second, strict=True):
        alike = same_start(one.sampled_ids, other.sampled_ids)
        diverged += one.sampled_ids != other.sampled_ids
        tokens += alike
        gaps = (abs(a - b) for a, b in zip(one.logprobs[:alike], other.logprobs[:alike], strict=True))
        largest = max(largest, *gaps, 0.0)
    return Divergence(len(first), diverged, tokens, largest)
