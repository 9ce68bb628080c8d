"""Trajectories that are in a store and in no run folder, such as those of a gateway."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rollwright.cli.event_loop import run_async
from rollwright.config import RunConfig, build
from rollwright.errors import RollwrightError
from rollwright.run.playbook import CONFIG_KEY
from rollwright.store.api import Store
from rollwright.store.opening import open_store
from rollwright.store.records import Rollout
from rollwright.trajectory import Trajectory

NEWEST = 20
"""Rollouts that are listed when none is asked for."""


@dataclass(frozen=True)
class Stored:
    """Trajectories of a store's file."""

    trajectories: list[Trajectory]
    config: RunConfig | None
    """The settings that the first of them was played with, where the store has them."""


def read_stored(file: Path, rollout: str | None, screen: Console) -> Stored:
    """The rollout with this id, or the only one whose id contains it; without one, the newest that have ended well."""

    async def read() -> Stored:
        store = await open_store(str(file), must_exist=True)
        try:
            return await _read(store, file, rollout, screen)
        finally:
            await store.close()

    return run_async(read())


async def _read(store: Store, file: Path, rollout: str | None, screen: Console) -> Stored:
    page = await store.query_rollouts(rollout_id_contains=rollout, sort_order="desc", limit=NEWEST)
    chosen = [each for each in page.items if each.rollout_id == rollout] or list(page.items)
    if rollout is not None and len(chosen) != 1:
        some = ", ".join(each.rollout_id for each in chosen[:5]) or f"`rollwright show {file}` lists some"
        raise RollwrightError(f"{rollout}: {page.total} rollouts of {file} are called so: {some}")
    encoded = await store.get_trajectories([each.rollout_id for each in chosen])
    if rollout is not None and not encoded:
        last = await store.query_attempts(chosen[0].rollout_id, sort_order="desc", limit=1)
        why = next((each.reason for each in last.items), None)
        raise RollwrightError(
            f"{chosen[0].rollout_id}: is {chosen[0].status} and has no trajectory"
            + (f": {why}" if why else "")
        )
    if left := len(chosen) - len(encoded):
        screen.print(f"{left} of the newest {len(chosen)} rollouts have no trajectory", highlight=False)
    config = await _settings(store, chosen[0]) if chosen else None
    return Stored([Trajectory.from_bytes(each) for each in encoded.values()], config)


async def _settings(store: Store, rollout: Rollout) -> RunConfig | None:
    found = await store.get_resources_by_id(rollout.resources_id) if rollout.resources_id else None
    settings = None if found is None else found.resources.get(CONFIG_KEY)
    return None if settings is None else build(settings, source=f"settings of {rollout.rollout_id}")
