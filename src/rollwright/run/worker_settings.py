"""A run's settings in its store: workers look them up for every rollout, and a resumed run is compared with them.

Invariant: under a run's name stand the settings that its rollouts are played with. Resuming the run with settings that
would change the episodes is an error, raised before anything in the store changes.
"""

import logging
import re
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

import msgspec

from rollwright.config import RunConfig, build
from rollwright.config.resuming import SettingChange, check_resumable, setting_changes
from rollwright.engines.base import Generation, Policy, Prompt, Renderer, Sampling
from rollwright.errors import ConfigError
from rollwright.rollout import AgentFunction, Assignment
from rollwright.rollout.episode import read_episode
from rollwright.rollout.remote_workers import RunDoor, WorkerBoard
from rollwright.rollout.stream import rollout_ids
from rollwright.run.build import SettingsTable, function_settings
from rollwright.run.build_agents import has_remote_agents
from rollwright.run.build_teams import build_run_policy
from rollwright.run.checks import probe_engine
from rollwright.store.api import Store
from rollwright.store.records import AttemptedRollout, RolloutStatus

logger = logging.getLogger(__name__)

MODEL = "policy.model"
"""May change as long as no batch was delivered, for example to a model that fits into memory."""

DELETED_AT_ONCE = 500
"""Rollouts that one call deletes from the store, so that other callers are served in between."""


async def leave_settings(
    store: Store, config: RunConfig, *, resumed: bool, handed_out: bool
) -> list[SettingChange]:
    """Write the settings under the run's name, which must be unique in the store; returns the changes since the run started.

    `handed_out`: whether the run has delivered a batch yet.
    """
    name, settings = config.name, {CONFIG_KEY: config.model_dump(mode="json")}
    found = await store.get_resources_by_id(name)
    if found is None:
        await store.add_resources(settings, resources_id=name)
        return []
    if not resumed:
        raise ConfigError(f"name: the store has a run {name!r} already; resume it, or give another name")
    changes: list[SettingChange] = []
    if (before := found.resources.get(CONFIG_KEY)) is not None:
        begun = build(before, source=f"settings of {name} in the store")
        changes = setting_changes(begun, config)
        refused = {each.key for each in changes if not each.may_change}
        if refused == {MODEL} and not handed_out:
            await _begin_anew(store, name)
        else:
            check_resumable(begun, config)
    await store.update_resources(name, settings)
    return changes


async def _begin_anew(store: Store, name: str) -> None:
    """Delete all rollouts of the run, because a model must not resume the episodes of another one."""
    own = re.compile(rf"{re.escape(name)}\.(train|val\d+)-g\d+-m\d+")
    ids = [each for each in await rollout_ids(store, f"{name}.") if own.fullmatch(each)]
    logger.warning("%s: another model plays, so %d rollouts begin anew", name, len(ids))
    for first in range(0, len(ids), DELETED_AT_ONCE):
        part = ids[first : first + DELETED_AT_ONCE]
        await store.cancel_rollouts(part, "another model plays")
        await store.delete_rollouts(part)


CONFIG_KEY, DOOR_KEY = "config", "remote_door"
"""Keys in a run's resources: the configuration, and where workers reach the board of remote programs."""

_ANY_HOST = ("0.0.0.0", "::")


def worker_urls(listening: Sequence[str], hosts: Sequence[str], public_url: str | None) -> tuple[str, ...]:
    """Addresses at which workers may reach the run, the nearest first. `hosts`: names of this machine, for a server that
    listens on all of its addresses."""
    urls: list[str] = []
    for url in listening:
        parts = urlsplit(url)
        anywhere = parts.hostname in _ANY_HOST
        urls += [f"http://{host}:{parts.port}" for host in ("127.0.0.1", *hosts)] if anywhere else [url]
    return tuple(dict.fromkeys([*urls, *([public_url.rstrip("/")] if public_url else [])]))


async def leave_door(store: Store, config: RunConfig, urls: Sequence[str], key: str) -> None:
    """Writes where workers of this run reach it now, beside its settings."""
    door = {"urls": list(urls), "key": key}
    await store.update_resources(config.name, {CONFIG_KEY: config.model_dump(mode="json"), DOOR_KEY: door})


async def find_door(store: Store, name: str) -> RunDoor | None:
    found = await store.get_resources_by_id(name)
    door = None if found is None else found.resources.get(DOOR_KEY)
    return None if door is None else msgspec.convert(door, RunDoor)


WAITING = [RolloutStatus.QUEUING, RolloutStatus.REQUEUING]

LOOKED_AT = 100
"""Waiting rollouts whose runs are checked before a worker starts: few runs share a store."""


class NoPolicy:
    """Policy of rollouts that were enqueued without settings; an agent function may need no model."""

    renderer: Renderer | None = None
    version = 0
    pressure = 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        raise ConfigError(
            "there is no policy to ask: the rollout was enqueued without settings (rollwright enqueue --config)"
        )

    async def close(self) -> None:
        pass


class StoreSettingsSource:
    """Settings and policy of each claimed rollout; looks up each run once, and keeps one policy per run."""

    def __init__(self, store: Store, function: AgentFunction | None = None) -> None:
        self._store = store
        self._function = function
        self._runs: dict[str, tuple[RunConfig, SettingsTable, Policy]] = {}

    @property
    def pressure(self) -> int:
        """Requests that the engines have refused because of overload."""
        return sum(policy.pressure for _, _, policy in self._runs.values())

    async def __call__(self, claimed: AttemptedRollout) -> Assignment:
        function = self._function
        if function is not None and claimed.resources_id is None:
            return Assignment(function_settings(RunConfig(), function), NoPolicy(), function)
        config, table, policy = await self._run(claimed.resources_id)
        if function is not None:
            return Assignment(function_settings(config, function), policy, function)
        return Assignment(table(read_episode(claimed.input)), policy)

    async def ask_engines(self) -> None:
        """Probe the engines of the runs whose rollouts wait now, before one is claimed; see `probe_engine`."""
        waiting = await self._store.query_rollouts(status=WAITING, limit=LOOKED_AT)
        for resources_id in {each.resources_id for each in waiting} - {None}:
            config, _, policy = await self._run(resources_id)
            await probe_engine(policy, config.policy)

    async def close(self) -> None:
        for _, table, policy in self._runs.values():
            if table.board is not None:
                await table.board.close()
            await table.close()
            await policy.close()

    async def _run(self, resources_id: str | None) -> tuple[RunConfig, SettingsTable, Policy]:
        if resources_id is None:
            raise ConfigError(
                "the rollout names no run whose settings it is to be played with (rollwright enqueue --config), and the "
                "worker has no function of its own (rollwright worker --agent)"
            )
        if resources_id not in self._runs:
            found = await self._store.get_resources_by_id(resources_id)
            if found is None or CONFIG_KEY not in found.resources:
                raise ConfigError(f"the store has no settings under {resources_id!r}")
            if resources_id not in self._runs:  # another episode may have asked in the meantime
                config = build(found.resources[CONFIG_KEY], source=f"settings of {resources_id}")
                board = None
                if has_remote_agents(config):
                    board = WorkerBoard(partial(find_door, self._store, resources_id))
                table, policy = SettingsTable(config, board), build_run_policy(config)
                table.use_policy(policy)
                self._runs[resources_id] = config, table, policy
        return self._runs[resources_id]
