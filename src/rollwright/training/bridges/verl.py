"""verl's inference servers as a policy, and an episode as verl's agent loops return it. Imports nothing of verl.

Always true: the ids and log-probabilities are the server's own. An answer without log-probabilities is refused,
because verl would then have to guess what the tokens were sampled with.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from rollwright.engines.base import EngineError, Generation, Prompt, Renderer, Sampling
from rollwright.engines.openai_api import shaping
from rollwright.errors import ConfigError
from rollwright.training.bridges.completions import Completion
from rollwright.trajectory import FinishReason, SamplingParams, VersionRun, floats, token_ids

ABORTED = "aborted"
"""verl's word for an answer that was cut off from outside."""
VERSION = "global_steps"
"""Under which name verl's servers say which weights answered."""

_HOW_MANY = ("max_tokens", "max_new_tokens", "logprobs", "n")
"""Of verl's sampling parameters, those that change no token's probability."""


class VerlServer(Protocol):
    """What an agent loop is given as `server_manager`."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any: ...


class VerlPolicy:
    """For one episode: `sampling_params` are the ones that verl chose for it."""

    def __init__(self, server: VerlServer, renderer: Renderer, sampling_params: Mapping[str, Any]) -> None:
        self.renderer = renderer
        self.version = 0
        """Of the weights that answered last."""
        self.pressure = 0
        self._server = server
        self._sampling = dict(sampling_params)
        told = shaping({name: each for name, each in self._sampling.items() if name not in _HOW_MANY})
        self._params = SamplingParams(**told)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        """Only the length of the answer is the episode's own to say; everything else is as verl samples."""
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
        """The servers are verl's."""

    def _finish(self, output: Any) -> FinishReason:
        if output.stop_reason == ABORTED:
            return FinishReason.ABORT
        ended = bool(output.token_ids) and output.token_ids[-1] in self.renderer.stop_ids
        return FinishReason.STOP if ended else FinishReason.LENGTH


def agent_loop_output(
    played: Completion, *, prompt_length: int, response_length: int, seconds: float
) -> dict[str, Any]:
    """The fields of verl's `AgentLoopOutput`. Nothing is cut off: what does not fit is refused."""
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
