"""A run's settings in its store: workers play by them, and a resumed run is compared with them.

Always true: under a run's name stand the settings that its rollouts are played with. Whoever resumes the run with others
is refused where they would change what is played, before anything in the store is changed.
"""

import logging
import re

from rollwright.config import RunConfig, build
from rollwright.config.resuming import SettingChange, check_resumable, setting_changes
from rollwright.errors import ConfigError
from rollwright.rollout.scheduler import rollout_ids
from rollwright.run.playbook import CONFIG_KEY
from rollwright.store.api import Store

logger = logging.getLogger(__name__)

MODEL = "policy.model"
"""May change as long as nothing was handed out: to one that fits into memory, say."""

DELETED_AT_ONCE = 500
"""Rollouts that are removed from the store in one call, so that others get their turn in between."""


async def leave_settings(
    store: Store, config: RunConfig, *, resumed: bool, handed_out: bool
) -> list[SettingChange]:
    """Puts the settings where workers find them, under the run's name, which no other run may have. Gives what of them
    is different from before. `handed_out`: whether the run has any result yet."""
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
    """What one model has begun is not gone on with by another."""
    own = re.compile(rf"{re.escape(name)}\.(train|val\d+)-g\d+-m\d+")
    ids = [each for each in await rollout_ids(store, f"{name}.") if own.fullmatch(each)]
    logger.warning("%s: another model plays, so %d rollouts begin anew", name, len(ids))
    for first in range(0, len(ids), DELETED_AT_ONCE):
        part = ids[first : first + DELETED_AT_ONCE]
        await store.cancel_rollouts(part, "another model plays")
        await store.delete_rollouts(part)
