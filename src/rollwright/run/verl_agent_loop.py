"""An agent loop for verl that plays rollwright's episodes. verl imports this module; it imports verl.

In the file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names:

    - name: rollwright
      _target_: rollwright.run.verl_agent_loop.RollwrightAgentLoop
      config: configs/frozen_lake.yaml

and in each row of verl's dataset `agent_name: rollwright` and `extra_info: {seed: 7}`, with a `tag` where the
configuration has several. Rows with the same seed are played on the same level, which makes them verl's group.
"""

import asyncio
from dataclasses import replace
from functools import lru_cache
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    AgentLoopBase,
    AgentLoopOutput,
)

from rollwright.config import RunConfig, load
from rollwright.engines.rendering import make_renderer
from rollwright.errors import ConfigError
from rollwright.rollout.episode import Episode, new_session, play_episode
from rollwright.run.build import SettingsTable, make_env
from rollwright.training.bridges.completions import completion_of
from rollwright.training.bridges.verl import VerlPolicy, agent_loop_output


@lru_cache
def _read(config: str) -> tuple[RunConfig, SettingsTable]:
    """Read the settings once, because verl makes an agent loop for every episode."""
    read = load(config)
    return read, SettingsTable(read)


@lru_cache(maxsize=1)
def _renderer(tokenizer: Any, name: str) -> Any:
    return make_renderer(tokenizer, name)


class RollwrightAgentLoop(AgentLoopBase):  # type: ignore[misc,unused-ignore]
    """One episode with an environment of rollwright and an inference server of verl."""

    def __init__(self, *arguments: Any, config: str, renderer: str = "auto", **more: Any) -> None:
        """`config`: a run's YAML file, of which the environments, the agent and the limits are used."""
        super().__init__(*arguments, **more)
        self._run_config, self._table = _read(config)
        self._renderer = _renderer(self.tokenizer, renderer)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play one episode; raises its error, because a failure is never a reward."""
        clock = asyncio.get_running_loop().time
        began = clock()
        episode = _episode(self._run_config, row)
        response_length = int(self.rollout_config.response_length)
        settings = self._table(episode)
        # The limit includes the prompt, so that an episode ends before its response would be truncated.
        settings = replace(settings, sequence_length=min(settings.sequence_length, response_length))
        policy = VerlPolicy(self.server_manager, self._renderer, sampling_params)
        env = make_env(settings)
        try:
            session = new_session(
                episode, policy, settings, env, rollout_id=f"verl-{uuid4().hex}", attempt_id="verl"
            )
            trajectory = await play_episode(session, env, settings, policy, lambda: make_env(settings))
        finally:
            await env.close()
        fields = agent_loop_output(
            completion_of(trajectory, own_sampling=True),  # verl chose the sampling parameters
            prompt_length=int(self.rollout_config.prompt_length),
            response_length=response_length,
            seconds=clock() - began,
        )
        return AgentLoopOutput(**fields)


def _episode(config: RunConfig, row: dict[str, Any]) -> Episode:
    info = row.get("extra_info") or {}
    tag = info.get("tag") or (config.tags[0] if len(config.tags) == 1 else None)
    if tag is None or info.get("seed") is None:
        raise ConfigError(f"extra_info: {info} needs a `seed`, and a `tag` out of {', '.join(config.tags)}")
    seed = int(info["seed"])
    return Episode(
        tag=tag,
        seed=seed,
        mode="train",
        group_id=f"verl-{tag}-{seed}",
        group=0,
        member=0,
        run_seed=config.seed,
    )
