"""Rollouts for TRL's `GRPOTrainer`, through its `rollout_func`.

Always true: data that TRL treats as on-policy is on-policy. Without vLLM, TRL ignores the log-probabilities that a rollout
function returns, so nothing would correct for tokens of older weights. Therefore changed weights are sent to the policy
before each batch, and a batch with a token of another version, or of another temperature than TRL's, is refused.
"""

import asyncio
import math
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rollwright.engines.base import Policy, Updatable, UpdateMode, Weights
from rollwright.errors import ConfigError, RollwrightError
from rollwright.training.bridges.completions import Completion, completion_of
from rollwright.trajectory import NO_VERSION, Trajectory

REWARD = "rollwright_reward"
"""Name of the field in which rewards are passed to the reward function."""

Result = TypeVar("Result")


class Groups(Protocol):
    """A batch as `get_batch` returns it."""

    @property
    def groups(self) -> Sequence[Any]: ...


class Playing(Protocol):
    """The part of `rollwright.Run` that the bridge uses."""

    policy: Policy
    config: Any

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def get_batch(self, batch_size: int | None = None) -> Groups: ...


class TrlRollouts:
    """`with TrlRollouts(run) as rollouts: GRPOTrainer(..., rollout_func=rollouts, reward_funcs=rollouts.reward)`.

    The run has an event loop in a separate thread, because TRL's trainer blocks. TRL's prompts only determine the number
    of episodes; tasks are chosen by the run.
    """

    def __init__(self, run: Playing) -> None:
        if run.config.async_generation_ratio != 0:
            raise ConfigError(
                f"async_generation_ratio: {run.config.async_generation_ratio:g} makes rollouts that are older than the "
                "weights, which TRL would train on as if they were not; only 0 is accepted"
            )
        if not isinstance(run.policy, Updatable):
            raise ConfigError("policy: takes no new weights, so its rollouts would not be TRL's model's")
        self._run = run
        self._policy: Updatable = run.policy
        self._synced: int | None = None
        """Trainer step whose weights the policy has; `None`: not synchronised yet."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._wait_for(self._run.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait_for(self._run.__aexit__(kind, error, trace))
        finally:
            self._stop()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Plays one episode for each prompt, in groups of `num_generations` with the same task."""
        self._check_groups(trainer)
        self.sync_weights(trainer)
        batch = self._wait_for(self._run.get_batch(len(prompts)))
        played = [completion_of(each) for group in batch.groups for each in _members(group)]
        if len(played) != len(prompts):
            raise RollwrightError(
                f"TRL asked for {len(prompts)} episodes and got {len(played)}; "
                "leave `min_group_size` unset, so that groups are whole"
            )
        for each in played:
            self._refuse_other_versions(each)
            _refuse_other_temperatures(each, trainer)
        return {
            "prompt_ids": [each.prompt for each in played],
            "completion_ids": [each.ids for each in played],
            "logprobs": [each.logprobs for each in played],
            "env_mask": [each.mask for each in played],
            REWARD: [each.reward for each in played],
        }

    def reward(self, completions: Sequence[Any], **fields: Any) -> list[float]:
        """Reward function for TRL: the rewards of the episodes that were played."""
        found: list[float] = fields[REWARD]
        return found

    def _check_groups(self, trainer: Any) -> None:
        manager = self._run.config.train_env_manager
        if manager is None or manager.group_size != trainer.num_generations:
            size = None if manager is None else manager.group_size
            raise ConfigError(
                f"train_env_manager.group_size: is {size}, but TRL's num_generations is {trainer.num_generations}; "
                "they must be the same"
            )

    def sync_weights(self, trainer: Any) -> None:
        """Sends the trainer's weights to the policy if they have changed."""
        step = int(trainer.state.global_step)
        if step == self._synced:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            raise ConfigError(
                "peft: TRL's adapters are not handed to the policy; train all weights, or use rollwright"
            )
        tensors = {name: each.detach().clone() for name, each in model.state_dict().items()}
        weights = Weights(version=step, tensors=tensors)
        self._wait_for(self._policy.update_weights(weights, UpdateMode.DRAIN))
        self._synced = step

    def _refuse_other_versions(self, played: Completion) -> None:
        if others := set(played.versions) - {self._synced, NO_VERSION}:
            raise RollwrightError(
                f"rollout {played.rollout_id} has tokens of version {min(others)}, but TRL is at {self._synced} and "
                "would train on them as on-policy"
            )

    def _wait_for(self, call: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _refuse_other_temperatures(played: Completion, trainer: Any) -> None:
    computed = float(trainer.temperature)
    for found in sorted(played.temperatures):
        if not math.isclose(found, computed, rel_tol=1e-5):  # kept as 32-bit floats
            raise ConfigError(
                f"sampling.temperature: rollout {played.rollout_id} was played at {found:g}, but TRL computes at "
                f"{computed:g}; they must be the same"
            )


def _members(group: Any) -> Sequence[Trajectory]:
    members: Sequence[Trajectory] = group.trajectories
    return members
