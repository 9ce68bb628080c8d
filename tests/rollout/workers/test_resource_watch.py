"""Before the machine runs out of memory or file handles, no further episode is opened, and that is said."""

import asyncio
import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.rollout.resources import (
    MARGIN,
    EpisodeCost,
    MachineResources,
    ResourceLimits,
    ResourceWatch,
    ceiling,
    look,
    shortage,
)

MIB, GIB = 1 << 20, 1 << 30
PLENTY = MachineResources(free_memory=8 * GIB, memory=16 * GIB, open_files=10, most_files=1024)
NO_MEMORY = MachineResources(free_memory=GIB // 2, memory=16 * GIB, open_files=10, most_files=1024)
NO_FILES = MachineResources(free_memory=8 * GIB, memory=16 * GIB, open_files=1000, most_files=1024)
LIMITS = ResourceLimits()


def test_what_is_short_is_named_with_its_figures() -> None:
    assert shortage(PLENTY, LIMITS) is None
    assert shortage(NO_MEMORY, LIMITS) == "memory: 512 of 16384 MiB are free, 5% must be"
    assert shortage(NO_FILES, LIMITS) == "file handles: 1000 of 1024 are in use, 10% must be free"


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_more_that_is_free_is_never_a_shortage_where_less_was_none(free: int, more: int) -> None:
    less = MachineResources(free, 2000, open_files=1000 - free, most_files=1000)
    richer = MachineResources(free + more, 2000, open_files=max(0, 1000 - free - more), most_files=1000)
    assert shortage(less, LIMITS) is not None or shortage(richer, LIMITS) is None


def test_this_machine_can_be_looked_at() -> None:
    now = look()
    assert 0 < now.free_memory <= now.memory
    assert 0 < now.open_files < now.most_files


async def test_a_shortage_holds_claims_back_until_it_is_over_and_both_are_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = ResourceWatch(LIMITS)
    await watch.enough()
    with caplog.at_level(logging.WARNING):
        watch.see(NO_MEMORY)
        watch.see(NO_MEMORY)
    assert [record.getMessage() for record in caplog.records] == [
        "no further episodes are opened for now: memory: 512 of 16384 MiB are free, 5% must be"
    ]
    waiting = asyncio.create_task(watch.enough())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    with caplog.at_level(logging.WARNING):
        watch.see(PLENTY)
    await asyncio.wait_for(waiting, 10)
    assert "opened again" in caplog.records[-1].getMessage()
    assert watch.shortage is None


async def test_a_worker_on_a_full_machine_takes_nothing_and_tells_the_store_why(workshop: Any) -> None:
    async def agent(task: Any, session: Any) -> float:
        return 1.0

    rollouts = await workshop.enqueue(4)
    full = ResourceLimits(memory_share=1.01)
    workshop.start(workshop.worker(agent, resources=full, heartbeat_interval=0.05))
    async with asyncio.timeout(30):
        while not (told := await workshop.store.get_worker_by_id("worker-0")) or not told.heartbeat_stats.get(
            "waiting"
        ):
            await asyncio.sleep(0.01)
    assert told.heartbeat_stats["waiting"].startswith("memory: ")
    page = await workshop.store.query_rollouts(rollout_ids=rollouts)
    taken = [each for each in page if each.status != "queuing"]
    assert taken == [], "it took rollouts before it had looked at the machine"


@given(st.integers(0, 400), st.integers(0, 4096), st.integers(0, 4096), st.floats(1, 512))
def test_a_ceiling_leaves_what_must_stay_free_and_grows_with_what_is_free(
    episodes: int, free: int, more: int, each: float
) -> None:
    cost = EpisodeCost(memory=each * MIB, files=2.0)
    now = MachineResources(free * MIB, 8192 * MIB, open_files=100, most_files=1024)
    richer = replace(now, free_memory=(free + more) * MIB)
    most, why = ceiling(now, now, LIMITS, cost, episodes)
    assert most <= ceiling(richer, richer, LIMITS, cost, episodes)[0]
    if most > episodes:
        assert (most - episodes) * cost.memory <= now.free_memory - LIMITS.memory_share * now.memory
        assert (most - episodes) * cost.files <= 0.9 * now.most_files - now.open_files
    assert most <= max(2 * episodes, episodes + 64)
    assert why or most > episodes
    assert ceiling(now, now, ResourceLimits(least=1), cost, 0)[0] >= 1


def test_what_an_episode_takes_is_learnt_and_fades() -> None:
    before = replace(PLENTY, used_memory=GIB)
    full = replace(PLENTY, used_memory=GIB + 320 * MIB, open_files=before.open_files + 20)
    cost = EpisodeCost().seen(full, before, 10)
    assert (cost.memory, cost.files) == (MARGIN * 32 * MIB, MARGIN * 2)
    later = cost.seen(before, before, 10)
    assert 0.9 * cost.memory < later.memory < cost.memory
    assert cost.seen(full, before, 0) == cost


def test_a_hundred_thousand_small_episodes_fit_where_their_memory_and_handles_do() -> None:
    """Each took 40 KiB and no file; 20,000 handles and 8 GiB are no reason to stop before the memory is used."""
    machine = MachineResources(8 * GIB, 16 * GIB, open_files=20, most_files=20_000, used_memory=GIB)
    cost, episodes, looks = EpisodeCost(), 0, 0
    while episodes < 100_000 and looks < 100:
        used = episodes * 40 * 1024
        now = replace(machine, free_memory=8 * GIB - used, used_memory=GIB + used)
        cost = cost.seen(now, machine, episodes)
        episodes, looks = ceiling(now, machine, LIMITS, cost, episodes)[0], looks + 1
    assert episodes >= 100_000
    assert looks < 20


def test_few_episodes_count_for_a_megabyte_and_a_file_each() -> None:
    machine = MachineResources(GIB, 2 * GIB, open_files=20, most_files=100)
    assert ceiling(machine, machine, LIMITS, EpisodeCost(), 64)[0] == 64 + (90 - 20 - 64)
    assert EpisodeCost().expected(64) == EpisodeCost(MIB, 1.0)
    assert EpisodeCost().expected(640).memory == MIB / 10


async def test_one_episode_goes_on_however_short_things_are_where_nobody_else_would() -> None:
    watch = ResourceWatch(ResourceLimits(memory_share=1.01, least=1))
    await asyncio.wait_for(watch.enter("a"), 10)
    waiting = asyncio.create_task(watch.enter("b"))
    await asyncio.sleep(0)
    assert not waiting.done()
    watch.leave("a")
    await asyncio.wait_for(waiting, 10)
    cancelled = asyncio.create_task(watch.enter("c"))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    watch.leave("b")
    await asyncio.wait_for(watch.enter("d"), 10)


@pytest.mark.parametrize("short", ["memory", "files"])
def test_a_run_in_one_process_plays_fewer_at_once_under_a_real_limit_and_fails_nothing_B12(
    short: str,
) -> None:
    program = Path(__file__).parent / "limited_run.py"
    done = subprocess.run([sys.executable, program, short], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["failed"] == []
    assert told["played"] == 96
    assert told["most"] < 45
    assert "episodes at once for now" in done.stderr or "no further episodes" in done.stderr
