"""verl's inference servers as a policy, and an episode in the format of verl's agent loops. Does not import verl.

Always true: ids and log-probabilities are those of the server. An answer without log-probabilities is refused, because
verl would then have to recompute the sampling distribution with other numerics.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from rollwright.engines.base import EngineError, Generation, Prompt, Renderer, Sampling
from rollwright.engines.openai_api import shaping
from rollwright.errors import ConfigError
from rollwright.training.bridges.completions import Completion
from rollwright.trajectory import FinishReason, SamplingParams, VersionRun, floats, token_ids

ABORTED = "aborted"
"""verl's stop reason of an aborted request."""
VERSION = "global_steps"
"""Field in which verl's servers return the version of their weights."""

_HOW_MANY = ("max_tokens", "max_new_tokens", "logprobs", "n")
"""Sampling parameters of verl that do not change the distribution of a token."""


class VerlServer(Protocol):
    """The `server_manager` of an agent loop."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any: ...


class VerlPolicy:
    """Policy of one episode. `sampling_params`: those that verl chose for it."""

    def __init__(self, server: VerlServer, renderer: Renderer, sampling_params: Mapping[str, Any]) -> None:
        self.renderer = renderer
        self.version = 0
        """Version of the weights that generated the latest answer."""
        self.pressure = 0
        self._server = server
        self._sampling = dict(sampling_params)
        told = shaping({name: each for name, each in self._sampling.items() if name not in _HOW_MANY})
        self._params = SamplingParams(**told)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        """Generates with verl's sampling parameters; only the length limit is the episode's."""
        assert prompt.ids is not None
        params = {
            **self._sampling,
            "max_tokens": sampling.max_tokens,
            "logprobs": True,
            "stop_token_ids": list(self.renderer.stop_ids),
        }
        output = await self._server.generate(
            prompt.episode, prompt_ids=prompt.ids.tolist(), sampling_params=params
        )
        ids = token_ids(output.token_ids)
        if output.log_probs is None or len(output.log_probs) != len(ids):
            raise EngineError(
                f"verl's server gave {len(ids)} tokens and {len(output.log_probs or ())} log-probabilities; "
                "set actor_rollout_ref.rollout.calculate_log_probs=true"
            )
        self.version = int(output.extra_fields.get(VERSION) or 0)
        return Generation(
            text=self.renderer.decode(ids),
            sampled_ids=ids,
            logprobs=floats(output.log_probs),
            versions=(VersionRun(self.version, len(ids)),) if ids else (),
            finish=self._finish(output),
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(ids),
            sampling=self._params,
        )

    async def close(self) -> None:
        """Closes nothing: verl owns the servers."""

    def _finish(self, output: Any) -> FinishReason:
        if output.stop_reason == ABORTED:
            return FinishReason.ABORT
        ended = bool(output.token_ids) and output.token_ids[-1] in self.renderer.stop_ids
        return FinishReason.STOP if ended else FinishReason.LENGTH


def agent_loop_output(
    played: Completion, *, prompt_length: int, response_length: int, seconds: float
) -> dict[str, Any]:
    """The fields of verl's `AgentLoopOutput`. An episode that exceeds verl's lengths is refused, never truncated."""
    for name, length, limit in (
        ("data.max_prompt_length", len(played.prompt), prompt_length),
        ("data.max_response_length", len(played.ids), response_length),
    ):
        if length > limit:
            raise ConfigError(
                f"{name}: {limit} is too few for rollout {played.rollout_id}, which has {length}"
            )
    return {
        "prompt_ids": played.prompt,
        "response_ids": played.ids,
        "response_mask": played.mask,
        "response_logprobs": played.logprobs,
        "reward_score": played.reward,
        "num_turns": 2 * played.turns,
        "metrics": {"generate_sequences": seconds},
        "extra_fields": {
            "turn_scores": [],
            "tool_rewards": [],
            "min_global_steps": min((each for each in played.versions if each >= 0), default=None),
            "max_global_steps": max(played.versions, default=None),
        },
    }
