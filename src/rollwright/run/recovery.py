"""Reconciles a run's folder with its store before the run is resumed.

Invariants, afterwards:
- Every trajectory of a delivered group that the store or the log has intact is in the log.
- Every rollout in the log is finished in the store, so that it is not played again.
- Trajectories that neither has are reported as lost.
- A damaged store is kept aside and replaced by a new one: finished rollouts come from the log, running episodes start again.
- Repeating the recovery changes nothing.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from rollwright.config import RunConfig, build, dump
from rollwright.config.resuming import check_resumable
from rollwright.errors import FormatError, RollwrightError
from rollwright.rollout.accounting import Fate
from rollwright.rollout.filters import build_filters
from rollwright.rollout.recovery import CompletionReplay
from rollwright.rollout.settling import NO_REASON
from rollwright.rollout.stream import CompletionsRead
from rollwright.run.folder import CONFIG, STORE, RunFolder, RunReader
from rollwright.run.gc_tuning import rare_collections
from rollwright.run.retention import own_index, replace_durably
from rollwright.run.trajectory_log import TRAJECTORIES
from rollwright.run.worker_settings import CONFIG_KEY
from rollwright.store.api import Store
from rollwright.store.opening import open_store, sqlite_path
from rollwright.store.records import (
    AttemptStatus,
    CompletionEntry,
    EnqueueRequest,
    RolloutStatus,
)
from rollwright.trajectory import Trajectory

AT_ONCE = 200
"""Rollouts that are read from a store, or entered into it, concurrently."""

WORKER = "recovery"
"""Worker id of the attempts that recovery enters into a store."""


async def recover(folder: RunFolder, address: str, config: RunConfig) -> None:
    """Check the store and complete the log from it; repairs are reported to the folder."""
    if address == "memory":
        return
    with rare_collections():  # what is read stays, so that collections would find nothing
        folder.completions = CompletionsRead()
        if (path := sqlite_path(address)) is not None:
            await _check_file(folder, path, folder.completions, config)
        store = await open_store(address)
        try:
            await _complete_log(folder, store, folder.completions, config)
        finally:
            await store.close()


async def restore_settings(run: Path, told: str | None) -> RunConfig | None:
    """Write the configuration that the store keeps of a run into its folder again; `None` if the store has none.

    `told`: the store's address, if it is not the run's own file.
    """
    address = told or str(run / STORE)
    try:
        store = await open_store(address, must_exist=True)
    except RollwrightError:
        return None
    try:
        found = await store.get_resources_by_id(run.name)
        if found is None and (page := await store.query_resources(limit=2)).total == 1:
            found = page[0]
    finally:
        await store.close()
    if found is None or CONFIG_KEY not in found.resources:
        return None
    config = build(found.resources[CONFIG_KEY], source=address)
    replace_durably(run / CONFIG, dump(config))
    return config


def resumed_settings(reader: RunReader, overrides: Sequence[str] = ()) -> RunConfig:
    """The run's own settings with these changes; raises an error for a change that would alter what the run plays."""
    before = reader.config
    if not overrides:
        return before
    settings = build(before.model_dump(mode="json"), list(overrides), source=str(reader.path / CONFIG))
    check_resumable(before, settings)
    return settings


async def _check_file(folder: RunFolder, path: Path, log: CompletionsRead, config: RunConfig) -> None:
    # imported here, because only a run with a SQLite file needs it
    from rollwright.store.sql.sqlite_integrity import check_integrity, move_aside, readable_trajectories

    rest = "finished rollouts come from the log, running episodes start again"
    if not await asyncio.to_thread(path.is_file):
        folder.tell(f"{path}: the store is missing; a new one is made: {rest}")
        folder.store_is_new = True
        return
    problems = await asyncio.to_thread(check_integrity, path)
    wrong = problems[0].removeprefix(f"{path}: ") if problems else await _unreadable(path, log)
    if wrong is not None:
        log.entries.clear()
        log.open_ids = None
        aside = move_aside(path)
        saved = _take(folder, await asyncio.to_thread(list, readable_trajectories(aside)), config)
        also = f"; {saved:,} finished trajectories were saved from it" if saved else ""
        folder.tell(
            f"{path}: is damaged ({wrong}); kept aside as {aside.name} and replaced by a new one: {rest}{also}"
        )
        folder.store_is_new = True


async def _unreadable(path: Path, log: CompletionsRead) -> str | None:
    """Error in the rows of a SQLite file, which SQLite's own check does not decode; `None` if all can be read."""
    from rollwright.store.sql.sqlite_integrity import decode_rollouts

    store = await open_store(str(path))
    try:
        log.open_ids = await asyncio.to_thread(
            decode_rollouts, path
        )  # in one pass: pages of a query would each cost a scan
        await log.read_on(store)
        await store.get_latest_resources()
    except Exception as error:  # noqa: BLE001 - damaged bytes raise anything
        return str(error) or type(error).__name__
    finally:
        await store.close()
    return None


def _take(folder: RunFolder, found: Iterable[bytes], config: RunConfig) -> int:
    """Add trajectories that were saved from a damaged store to the log; returns their number.

    A delivered group gets no more members than its size: a rollout that finished too late for it may be among them.
    """
    reader = RunReader(folder.path)
    recorded, sizes = _delivered_groups(reader), _group_sizes(config, reader)
    members: dict[str, int] = {}
    for rollout_id in folder.log.rollouts:
        group_id = rollout_id.rpartition("-m")[0]
        members[group_id] = members.get(group_id, 0) + 1
    forgotten, taken = reader.forgotten(), 0
    for encoded in found:
        try:
            trajectory = Trajectory.from_bytes(encoded)
        except FormatError:
            continue
        rollout_id, group_id = trajectory.rollout_id, trajectory.group_id
        there = members.get(group_id, 0)
        room = group_id not in recorded or there < sizes(group_id)
        wanted = _is_own(config, rollout_id) and not forgotten.has_rollout(rollout_id)
        if wanted and room and rollout_id not in folder.log:
            folder.add_trajectory(rollout_id, encoded)
            members[group_id] = there + 1
            taken += 1
    return taken


async def _complete_log(
    folder: RunFolder, store: Store, completions: CompletionsRead, config: RunConfig
) -> None:
    """Add the trajectories of delivered groups that only the store has, and report those that neither has.

    Other groups need nothing: the resumed scheduler collects them from the store.
    """
    reader = RunReader(folder.path)
    forgotten, recorded = reader.forgotten(), _delivered_groups(reader)
    sizes = _group_sizes(config, reader)
    lacking: dict[str, list[str]] = {}
    """Finished rollouts that the log lacks, by group."""
    log: dict[str, list[CompletionEntry]] = {}
    """All completions by group, in their order."""
    own = _own_prefixes(config)
    for completion in await completions.read_on(store):
        if not completion.rollout_id.startswith(own):
            continue
        group_id = completion.rollout_id.rpartition("-m")[0]
        if not forgotten.has_group(group_id):
            log.setdefault(group_id, []).append(completion)
            if completion.status is RolloutStatus.FAILED:
                folder.add_failure(completion.rollout_id, completion.reason or NO_REASON)
            if completion.status is RolloutStatus.SUCCEEDED and completion.rollout_id not in folder.log:
                lacking.setdefault(group_id, []).append(completion.rollout_id)
    lost: list[str] = []
    added = 0
    for group_id, missing in lacking.items():
        found = await _readable(store, missing)
        taken = missing
        if group_id in recorded:
            known = {**found, **_in_log(folder, log[group_id])}
            taken = _members_of(config, sizes, group_id, log[group_id], known)
            for rollout_id in taken:
                if rollout_id in found and rollout_id not in folder.log:
                    folder.add_trajectory(rollout_id, found[rollout_id].to_bytes())
                    added += 1
        lost += [each for each in missing if each in taken and each not in found]
    if added:
        folder.tell(
            f"{folder.path / TRAJECTORIES}: {added:,} finished trajectories were read again from the store"
        )
    if lost:
        folder.lose(lost)


def _members_of(
    config: RunConfig,
    sizes: Callable[[str], int],
    group_id: str,
    log: Sequence[CompletionEntry],
    known: dict[str, Trajectory],
) -> list[str]:
    """Members of a delivered group; rollouts that finished too late for it are not."""
    manager = config.train_env_manager if _mode(config, group_id) == "train" else config.val_env_manager
    if manager is None:
        return []
    replay = CompletionReplay([group_id], sizes, build_filters(manager))
    taken = []
    for completion in log:
        replay.apply(completion, known.get(completion.rollout_id))
        fate, _ = replay.fates[group_id][-1]
        if completion.status is RolloutStatus.SUCCEEDED and fate is not Fate.CANCELLED:
            taken.append(completion.rollout_id)
    return taken


async def enter_finished(store: Store, folder: RunFolder, log: CompletionsRead, config: RunConfig) -> None:
    """Mark the folder's finished and permanently failed rollouts as such in the store, whose completions up to some position
    are in `log`."""
    final = {each.rollout_id for each in await log.read_on(store)}
    unknown = [each for each in folder.log.rollouts if each not in final]
    own = [each for each in unknown if _is_own(config, each)]
    failed = [
        each for each in folder.failed if _is_own(config, each) and each not in final and each not in own
    ]
    if own and not folder.store_is_new:
        folder.tell(
            f"{folder.path}: its store does not know that {len(own):,} rollouts are finished, and they are entered again; "
            "was it replaced, or is its write-ahead log missing? Running episodes start again"
        )
    for first in range(0, len(own), AT_ONCE):
        await _enter(store, own[first : first + AT_ONCE], config)
    for first in range(0, len(failed), AT_ONCE):
        part = failed[first : first + AT_ONCE]
        await store.enqueue_many_rollouts([_request(each, config) for each in part])
        for each in part:
            await store.update_rollout(each, status=RolloutStatus.FAILED, reason=folder.failed[each])


async def _enter(store: Store, rollout_ids: Sequence[str], config: RunConfig) -> None:
    """Enter rollouts as finished, without their trajectories."""
    known = await store.enqueue_many_rollouts([_request(each, config) for each in rollout_ids])
    for each in known:
        if each.status in (
            RolloutStatus.PREPARING,
            RolloutStatus.RUNNING,
        ):  # claimed by a process that has ended
            await store.update_rollout(each.rollout_id, status=RolloutStatus.REQUEUING)
    started = [await store.start_attempt(each, WORKER) for each in rollout_ids]
    ends = [
        store.update_attempt(each.rollout_id, each.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
        for each in started
    ]
    await asyncio.gather(*ends)


def _request(rollout_id: str, config: RunConfig) -> EnqueueRequest:
    """Request for a rollout that is finished already."""
    played = {"finished": "before its store was made"}
    return EnqueueRequest(input=played, rollout_id=rollout_id, mode=_mode(config, rollout_id))


async def _readable(store: Store, rollout_ids: Sequence[str]) -> dict[str, Trajectory]:
    found: dict[str, Trajectory] = {}
    for rollout_id, encoded in (await store.get_trajectories(rollout_ids)).items():
        try:
            found[rollout_id] = Trajectory.from_bytes(encoded)
        except FormatError:
            continue
    return found


def _in_log(folder: RunFolder, log: Sequence[CompletionEntry]) -> dict[str, Trajectory]:
    kept = folder.log.read([each.rollout_id for each in log])
    return {rollout_id: Trajectory.from_bytes(encoded) for rollout_id, encoded in kept.items()}


def _delivered_groups(reader: RunReader) -> Collection[str]:
    """Groups that were delivered."""
    return {group for row in reader.metrics() for group in row["groups"]}


def _is_own(config: RunConfig, rollout_id: str) -> bool:
    return rollout_id.startswith(_own_prefixes(config))


def _own_prefixes(config: RunConfig) -> tuple[str, str]:
    """What the ids of the run's own rollouts begin with."""
    return f"{config.name}.train-", f"{config.name}.val"


def _mode(config: RunConfig, name: str) -> str:
    """Mode of a rollout or a group, by its id."""
    return "train" if name.startswith(f"{config.name}.train-") else "val"


def _group_sizes(config: RunConfig, reader: RunReader) -> Callable[[str], int]:
    """Sizes of groups by their ids; those of training groups are recorded where they differ."""
    recorded = reader.group_sizes()

    def size(group_id: str) -> int:
        mode = _mode(config, group_id)
        manager = config.train_env_manager if mode == "train" else config.val_env_manager
        index = own_index(config.name, group_id) if mode == "train" else None
        usual = 0 if manager is None else manager.group_size
        return usual if index is None else recorded.get(index, usual)

    return size
