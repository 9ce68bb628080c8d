"""Builds a swarm node's settings, tasks and transport from the configuration."""

import logging
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import cast

import rollwright.envs.registry as registry
from rollwright.config import CustomEnvConfig, RunConfig, SwarmConfig
from rollwright.errors import ConfigError
from rollwright.rewards.settings import JudgeSettings
from rollwright.rollout.episode import Episode
from rollwright.run.build import SettingsTable
from rollwright.run.build_training import check, training_of
from rollwright.swarm.identity import Identity
from rollwright.swarm.recipes import TaskBook, task_seed
from rollwright.swarm.settings import TRANSPORTS
from rollwright.swarm.transports.base import Transport
from rollwright.swarm.transports.gossip import GossipTransport
from rollwright.swarm.transports.zenoh_link import ZenohLink

_log = logging.getLogger(__name__)

KEPT_STEPS = 200
"""Default of `training.keep_steps` for a node: more than its status shows, so that its last rounds can be inspected with
their episodes, and few compared with the rounds of months."""


def swarm_of(config: RunConfig) -> SwarmConfig:
    """The swarm section of the configuration; raises an error if it is missing."""
    if config.swarm is None:
        raise ConfigError("swarm: is not set; `swarm: {}` shares with every default")
    return config.swarm


def node_config(config: RunConfig, peer: str) -> RunConfig:
    """Configuration of this node's run: its seed derives from its key, its batch is `local_groups`."""
    swarm, manager = swarm_of(config), config.train_env_manager
    check(config)
    assert manager is not None, "checked above"
    alone = unverifiable_tags(config)
    if not set(manager.tags) - alone.keys():
        tag = manager.tags[0]
        raise ConfigError(f"custom_envs.{tag}: nothing of this run can be shared: {alone[tag]}")
    if config.training is not None and config.training.from_run is not None:
        raise ConfigError("training.from_run: a node plays its own groups; leave it out")
    if manager.group_size < 2:
        raise ConfigError(
            f"train_env_manager.group_size: {manager.group_size} gives groups without an advantage to learn from; at least 2 are "
            "needed"
        )
    batch = swarm.local_groups * manager.group_size
    if config.rollout_batch_size not in (None, batch):
        raise ConfigError(
            f"rollout_batch_size: {config.rollout_batch_size} is not local_groups x group_size, which is {batch}; leave "
            "it out"
        )
    training = training_of(config)
    if training.keep_steps is None:
        training = training.model_copy(update={"keep_steps": KEPT_STEPS})
    return config.model_copy(
        update={
            "seed": task_seed(swarm.name, peer),
            "rollout_batch_size": batch,
            "training": training,
        }
    )


def unverifiable_tags(config: RunConfig) -> dict[str, str]:
    """Tags whose groups a peer cannot verify, with the reason. The node trains on its own groups of them."""
    found: dict[str, str] = {}
    for tag in config.tags:
        custom = config.custom_envs.get(tag, CustomEnvConfig())
        if custom.tasks is None and registry.spec(custom.env_type or tag).plays_episodes:
            found[tag] = "a peer cannot play the episodes of its environment's own loop again"
        elif custom.agent is not None:
            found[tag] = "a peer cannot play the calls of an agent's own program again"
        elif any(isinstance(each, JudgeSettings) for each in custom.rewards):
            found[tag] = "another machine's judge may give another verdict"
    return found


def task_book(config: RunConfig) -> TaskBook:
    """Tasks that this node plays, and can verify."""
    table = SettingsTable(config)
    unverifiable = unverifiable_tags(config)
    for tag, why in unverifiable.items():
        _log.warning("custom_envs.%s: its groups stay on this node: %s", tag, why)
    return TaskBook(
        {tag: table(Episode(tag, 0, "train", "", 0, 0, 0)) for tag in table.training_tags()},
        level_of=table.swarm_level,
        unverifiable=unverifiable,
    )


async def open_transport(
    config: SwarmConfig, identity: Identity, *, clock: Callable[[], float] = time.time
) -> Transport:
    """Open the configured transport; its factory may be async."""
    settings = config.communication
    if settings.announce == "views":
        link = await ZenohLink.join(config, identity.peer, clock=clock)
        return await GossipTransport.start(identity, config, link, clock=clock)
    made = TRANSPORTS.make(settings.transport, config, identity.peer, clock=clock, **settings.options)
    with TRANSPORTS.blame(settings.transport):
        return cast(Transport, await made if isawaitable(made) else made)
