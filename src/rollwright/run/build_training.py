"""Builds the trainer and the trained policy from the configuration. Only building a trainer imports torch."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rollwright.config import RunConfig, TrainingConfig
from rollwright.engines.base import Policy, Updatable
from rollwright.engines.factory import build_policy
from rollwright.errors import ConfigError
from rollwright.hardware import claim_threads
from rollwright.rollout.settings.strategies import TreeStrategyConfig
from rollwright.run.build import SettingsTable
from rollwright.run.folder import RunReader
from rollwright.run.model_choice import cache_room
from rollwright.training.advantages import Advantage, ValueBased, make_advantage
from rollwright.training.settings import LOSSES
from rollwright.trajectory import MIN_TEMPERATURE

if TYPE_CHECKING:
    from rollwright.training.ranks.leader import LeadingTrainer, Setup
    from rollwright.training.service.remote_trainer import RemoteTrainer
    from rollwright.training.trainer import Trainer


BESIDE_WEIGHTS = (".json", ".jinja", ".txt", ".model")
"""File types of tokenizers and chat templates."""

IN_PROCESS = "torch"
"""Kind of the policy whose model is in this process: it holds the base model, and takes weights in memory."""


def in_process(config: RunConfig) -> bool:
    kind: str = config.policy.kind
    return kind == IN_PROCESS


def training_of(config: RunConfig) -> TrainingConfig:
    """The training section of the configuration; raises an error if it is missing or cannot be trained with."""
    training = config.training
    if training is None:
        raise ConfigError("training: is not set; `training: {}` trains with every default")
    if training.from_run is None and config.train_env_manager is None:
        raise ConfigError("train_env_manager: is not set, so there is nothing to train on")
    if config.sampling.top_p != 1:
        raise ConfigError(
            f"sampling.top_p: {config.sampling.top_p:g} cuts the distribution that is trained; only 1 is accepted"
        )
    if config.sampling.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"sampling.temperature: {config.sampling.temperature:g} cannot be trained; accepted: {MIN_TEMPERATURE:g} or "
            "more"
        )
    return training


def model_name(config: RunConfig) -> str:
    """Name of the base model."""
    training = config.training
    if training is not None and training.model is not None:
        return training.model
    if in_process(config):
        return str(getattr(config.policy, "model", None))
    raise ConfigError(
        f"training.model: is needed, because a policy of kind `{config.policy.kind}` has no model in this process"
    )


def check(config: RunConfig) -> None:
    """Check the settings before anything is written or loaded; raises the first error."""
    training = training_of(config)
    check_ranks(training)
    check_served(training)
    check_critic(training, make_training_advantage(training))
    if not LOSSES.is_built_in(training.loss.name):
        LOSSES.function(training.loss.name, **training.loss.options)
    model_name(config)
    if training.from_run is not None:
        source = RunReader(Path(training.from_run))
        _check_whole(source)
        _check_history(config, source.config)
        _check_sampling(config, source.config)
    else:
        _check_lone_trees(config, SettingsTable(config))


def _check_lone_trees(config: RunConfig, table: SettingsTable) -> None:
    """Refuse trees that are alone in their group and whose first answers, of one token each, soon all come out the same.

    Equal answers are one turn, so such a tree is a single path as soon as the policy prefers one move: it is compared with
    nothing, and a lone tree without a running value has no gradient at all.
    """
    training, played = training_of(config), config.train_env_manager
    if not isinstance(config.strategy, TreeStrategyConfig) or played is None or played.group_size > 1:
        return
    if training.advantage.options.get("kappa", 0):
        return
    for tag in played.tags:
        if table.answer_tokens(tag) == 1:
            raise ConfigError(
                f"train_env_manager.group_size: a tree alone in its group learns nothing where its first answers come out the "
                f"same, and answers of `{tag}` have one token; accepted: 2 or more, or a running value to compare it "
                "with (training.advantage: {name: tree, options: {kappa: 2}})"
            )


def check_ranks(training: TrainingConfig) -> None:
    """Check that the ranks can be divided as the settings say."""
    if training.sharding == "hybrid" and training.processes % training.shard_ranks:
        raise ConfigError(
            f"training.shard_ranks: {training.shard_ranks} does not divide training.processes, "
            f"which is {training.processes}"
        )


def check_served(training: TrainingConfig) -> None:
    """Check that a trainer elsewhere is asked for nothing that only this process could do."""
    if training.serve is None:
        return
    for key, is_set in (("processes", training.processes > 1), ("critic", training.critic is not None)):
        if is_set:
            raise ConfigError(
                f"training.{key}: belongs to the trainer, which `training.serve` leaves elsewhere; leave it out"
            )
    if training.hand_over in ("tensors", "adapter"):
        raise ConfigError(
            "training.hand_over: a trainer elsewhere gives whole folders; accepted: auto, folder"
        )


def check_adapters(policy: Policy, training: TrainingConfig) -> None:
    """Check that there are adapters to hand over, and that the policy takes them."""
    if training.hand_over != "adapter":
        return
    if training.lora is None:
        raise ConfigError("training.hand_over: `adapter` needs training.lora; `lora: {}` takes every default")
    if not getattr(policy, "takes_adapters", False):
        raise ConfigError(
            f"training.hand_over: a {type(policy).__name__} takes no adapters; accepted: auto, or a policy of kind vllm or sglang"
        )


def check_critic(training: TrainingConfig, advantage: Advantage) -> None:
    """Check that values are computed where they are used, and used where they are computed."""
    uses, name = isinstance(advantage, ValueBased), training.advantage.name
    if uses and training.critic is None:
        raise ConfigError(
            f"training.critic: is needed by the advantage `{name}`; `critic: {{}}` takes every default"
        )
    if training.critic is not None and not uses:
        raise ConfigError(
            f"training.critic: the advantage `{name}` uses no values; set training.advantage to gae, or leave the critic out"
        )


def _check_whole(source: RunReader) -> None:
    if steps := source.forgotten().steps:
        raise ConfigError(
            f"training.from_run: {source.path} has forgotten its first {steps} steps (training.keep_steps), so its batches "
            "cannot be trained on from the base model"
        )


def _check_history(config: RunConfig, played: RunConfig) -> None:
    """Training uses the prompts that the model saw, so that the history cannot be changed afterwards."""
    wanted, had = config.agent.history, played.agent.history
    if wanted != had:
        raise ConfigError(
            f"agent.history: the recorded run was played with `{had.mode}`, length {had.length}; a history that is cut "
            f"only for training would be trained off-policy. Play with `{wanted.mode}`, or leave it as it was"
        )


def _check_sampling(config: RunConfig, played: RunConfig) -> None:
    """Training uses the tokens as they were sampled; the run's settings say how, if the trajectories do not."""
    for name in ("temperature", "top_p"):
        wanted, had = getattr(config.sampling, name), getattr(played.sampling, name)
        if wanted != had:
            raise ConfigError(
                f"sampling.{name}: the recorded run was played with {had:g}, not {wanted:g}; leave it as it was"
            )


def make_policy(config: RunConfig) -> Policy | None:
    """The trained policy, with its model loaded if that is in this process; `None` if a recorded run is trained on."""
    check(config)
    if training_of(config).from_run is not None:
        return None
    policy = build_policy(config.policy, cache_room(config))
    updatable(policy, config.policy.kind)
    check_adapters(policy, training_of(config))
    return policy


def copy_tokenizer(config: RunConfig, place: Path) -> None:
    """Copy the files beside the base model's weights, such as its tokenizer, to the trained weights."""
    from rollwright.models.loading import resolve

    base = Path(resolve(model_name(config)))
    for file in sorted(base.iterdir()) if base.is_dir() else ():
        if file.suffix in BESIDE_WEIGHTS and not (place / file.name).exists() and ".index." not in file.name:
            shutil.copy(file, place)


def make_training_advantage(training: TrainingConfig) -> Advantage:
    return make_advantage(training.advantage.name, **training.advantage.options)


AnyTrainer: TypeAlias = "Trainer | LeadingTrainer | RemoteTrainer"
"""A trainer in this process, on several ranks, or elsewhere."""


def make_trainer(config: RunConfig, run: Path, ray: str | None = None) -> AnyTrainer:
    """Load the base model and build its trainer, on all ranks; takes seconds to minutes.

    `run`: the run's folder. `ray`: address of the Ray cluster on which the other ranks run; `None`: on this machine, or under
    torchrun where it has started them.
    """
    training = training_of(config)
    if training.serve is not None:
        from rollwright.training.service.remote_trainer import RemoteTrainer

        return RemoteTrainer(model_name(config), training.serve, run, temperature=config.sampling.temperature)
    claim_threads()
    try:
        from rollwright.training.trainer import Trainer
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}; install rollwright[train]") from error
    from rollwright.models import load_model

    total_updates = config.max_steps * training.updates_per_step
    if is_under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        return _lead_torchrun(config, training, total_updates)
    if training.processes > 1:
        from rollwright.training.ranks.leader import LeadingTrainer

        setup = _setup(config, training, total_updates)
        if ray is None:
            return LeadingTrainer(setup)
        from rollwright.hardware import pick_device
        from rollwright.run.ray_ranks import ray_ranks

        start, host = ray_ranks(ray, gpus=pick_device(training.device).type == "cuda")
        return LeadingTrainer(setup, start, host)
    return Trainer(
        load_model(model_name(config)),
        training,
        total_updates=total_updates,
        temperature=config.sampling.temperature,
        seed=config.seed,
    )


def _lead_torchrun(config: RunConfig, training: TrainingConfig, total_updates: int) -> AnyTrainer:
    """The trainer of rank 0 among ranks that torchrun has started, which it also replaces."""
    from rollwright.training.ranks.leader import LeadingTrainer
    from rollwright.training.ranks.torchrun import TorchrunRanks, leader_host, torchrun_size

    size = torchrun_size() if training.processes == 1 else training.processes
    setup = _setup(config, training.model_copy(update={"processes": size, "rank_restarts": 0}), total_updates)
    return LeadingTrainer(setup, TorchrunRanks, leader_host())


def _setup(config: RunConfig, training: TrainingConfig, total_updates: int) -> "Setup":
    from rollwright.training.ranks.leader import Setup

    return Setup(model_name(config), training, total_updates, config.sampling.temperature, config.seed)


def is_under_torchrun() -> bool:
    """Whether torchrun started this process; tells without importing torch."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def updatable(policy: Policy, kind: str) -> Updatable:
    """The policy, checked to accept new weights."""
    if not isinstance(policy, Updatable):
        raise ConfigError(
            f"policy.kind: `{kind}` takes no new weights, so it cannot be trained; "
            "use `torch`, or an engine that loads weights, such as `vllm`"
        )
    return policy
