"""The node's own policy as the `Scorer` of verification.

The log-probabilities are the trainer's: it has the engine's weights, whatever the engine is, and is idle between two steps.
Calls that arrive while it computes are batched for the next computation.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollwright.engines.base import Policy, Renderer
from rollwright.errors import ConfigError
from rollwright.run.training import TrainingRun
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.verification import tokenizer_digest
from rollwright.trajectory import Floats, TokenIds, floats, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Call = tuple[TokenIds, TokenIds, "asyncio.Future[Floats]"]


class PolicyScorer:
    """A `rollwright.swarm.verification.Scorer`."""

    def __init__(
        self,
        run: TrainingRun,
        policy: Policy,
        tokenizer: "PreTrainedTokenizerBase",
        on_progress: Callable[[], None],
    ) -> None:
        if policy.renderer is None:
            raise ConfigError(
                "policy: speaks text alone, so it cannot share rollouts; use one with token ids"
            )
        self.renderer: Renderer = policy.renderer
        self.tokenizer = tokenizer_digest(tokenizer)
        self._run = run
        self._tokenizer = tokenizer
        self._marks = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        """Special ids of roles and ends, which no text may introduce."""
        self._on_progress = on_progress
        self._waiting: list[_Call] = []
        self._work: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._run.trainer.version

    def encode(self, text: str) -> TokenIds:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._marks & set(ids):  # plain text for another model may be special tokens of this one
            raise PeerRefused(
                PeerRefusal.CANNOT_CHECK, "its text contains special tokens of this node's model"
            )
        return token_ids([*ids, self.renderer.stop_ids[0]])

    async def logprobs(self, prompt: TokenIds, sampled: TokenIds) -> Floats:
        if not sampled:
            return floats()
        done: asyncio.Future[Floats] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, sampled, done))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._compute())
        return await done

    async def _compute(self) -> None:
        while self._waiting:
            calls, self._waiting = self._waiting, []
            try:
                found = await self._run.logprobs([(prompt, sampled) for prompt, sampled, _ in calls])
            except Exception as error:  # noqa: BLE001 - every caller gets the error and ends its own group
                for _, _, done in calls:
                    if not done.done():
                        done.set_exception(error)
                continue
            self._on_progress()
            for (_, _, done), own in zip(calls, found, strict=True):
                if not done.done():  # the check was cancelled meanwhile
                    done.set_result(own)
