"""A box is gone when its attempt is: by `stop`, with the processes that hold it, and when its lease ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.sandbox import cgroups
from rollwright.sandbox.box import BoxLabel, BoxSpec
from rollwright.sandbox.bubblewrap import BubblewrapBackend
from rollwright.sandbox.leases import (
    BoxRecord,
    boot_id,
    boxes_folder,
    id_prefix,
    is_abandoned,
    list_records,
    new_box_id,
    now,
    reap,
    start_time,
    write_record,
)

LABEL = BoxLabel(rollout_id="rollout", attempt_id="attempt", lease_seconds=20.0)
PATIENCE = 20.0
"""Seconds for a busy machine; what is waited for takes less than one."""

HOLDING = """
import asyncio, sys
from rollwright.sandbox.box import BoxLabel, BoxSpec
from rollwright.sandbox.bubblewrap import BubblewrapBackend

async def hold():
    backend = BubblewrapBackend(state=sys.argv[1])
    for _ in range(3):
        box = await backend.start(BoxSpec(), BoxLabel(rollout_id="r", lease_seconds=float(sys.argv[2])))
        await box.run("sleep 4321 & :")
    print("held", flush=True)
    await asyncio.sleep(1000)

asyncio.run(hold())
"""


def leftovers(state: Path) -> list[str]:
    """Everything on this machine that belongs to boxes of this state folder."""
    found = [f"folder {each.name}" for each in boxes_folder(state).glob("*")]
    found += [f"group {each}" for each in cgroups.all_groups() if each.startswith(id_prefix(state))]
    with suppress(OSError):
        found += [
            f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if str(state) in line
        ]
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if f"{state}/boxes" in words:
            found.append(f"process {words[:80]}")
    return found


async def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, "not within the time that a busy machine may take"
        await asyncio.sleep(0.05)


async def gone(state: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := leftovers(state):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


def start_holding(state: Path, lease: float = 20.0) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(state), str(lease)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


async def test_a_stopped_box_leaves_nothing(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(memory_mb=64, cpus=1, disk_mb=8), LABEL)
    await box.run("mkdir -m 0 /shut; sleep 1234 & :")
    assert leftovers(bubblewrap.state)
    await box.stop()
    assert leftovers(bubblewrap.state) == []


async def test_a_box_is_found_by_its_label(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    (record,) = list_records(bubblewrap.state)
    assert record.id == box.id
    assert (record.label.rollout_id, record.label.attempt_id) == ("rollout", "attempt")
    assert start_time(record.holder) == record.holder_start


@pytest.mark.usefixtures("bubblewrap")
async def test_boxes_are_gone_when_the_process_that_holds_them_is_killed(tmp_path: Path) -> None:
    process = start_holding(tmp_path)
    assert len(list_records(tmp_path)) == 3
    process.kill()
    process.wait()
    await gone(tmp_path)


@pytest.mark.usefixtures("bubblewrap")
async def test_boxes_of_a_process_that_stands_still_are_gone_after_their_lease(tmp_path: Path) -> None:
    process = start_holding(tmp_path, lease=2.0)
    process.send_signal(signal.SIGSTOP)
    try:
        await gone(tmp_path)
    finally:
        process.kill()
        process.wait()


async def test_a_lease_is_renewed_while_its_process_lives(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), BoxLabel(lease_seconds=0.5))
    first = now()
    await wait_until(lambda: now() > first + 2.0)
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_a_box_whose_holder_is_killed_is_removed_by_the_process_that_has_it(
    bubblewrap: BubblewrapBackend,
) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    await box.run("sleep 1234 & :")
    (record,) = list_records(bubblewrap.state)
    os.kill(record.holder, signal.SIGKILL)
    await gone(bubblewrap.state)
    assert box.has_ended


@pytest.mark.usefixtures("bubblewrap")
async def test_what_is_left_when_everything_is_killed_at_once_is_removed_by_any_other_process(
    tmp_path: Path,
) -> None:
    process = start_holding(tmp_path)
    records = list_records(tmp_path)
    for pid in (process.pid, *(each.holder for each in records)):
        os.kill(pid, signal.SIGSTOP)
    for pid in (process.pid, *(each.holder for each in records)):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    await wait_until(lambda: all(start_time(each.holder) is None for each in records))
    assert sorted(await asyncio.to_thread(reap, tmp_path)) == sorted(each.id for each in records)
    await gone(tmp_path)


@pytest.mark.usefixtures("bubblewrap")
async def test_a_holder_that_hangs_is_killed_with_its_box(tmp_path: Path) -> None:
    process = start_holding(tmp_path, lease=1.0)
    records = list_records(tmp_path)
    for pid in (process.pid, *(each.holder for each in records)):
        os.kill(pid, signal.SIGSTOP)
    ends = now() + 3.0
    await wait_until(lambda: now() > ends)
    try:
        await asyncio.to_thread(reap, tmp_path)
        await gone(tmp_path)
    finally:
        process.kill()
        process.wait()


def record_of(state: Path, **changes: object) -> BoxRecord:
    own = os.getpid()
    record = BoxRecord(
        id=new_box_id(state),
        backend="bubblewrap",
        label=LABEL,
        boot_id=boot_id(),
        holder=own,
        holder_start=start_time(own) or 0,
        created=time.time(),
    )
    return msgspec.structs.replace(record, **changes)


def test_boxes_from_before_a_loss_of_power_are_removed(tmp_path: Path) -> None:
    kept, lost = record_of(tmp_path), record_of(tmp_path, boot_id="another boot")
    for each in (kept, lost):
        write_record(boxes_folder(tmp_path) / each.id, each)
        (boxes_folder(tmp_path) / each.id / "layer" / "upper").mkdir(parents=True)
    assert reap(tmp_path) == [lost.id]
    assert [each.id for each in list_records(tmp_path)] == [kept.id]


def test_boxes_of_another_state_folder_are_not_touched(tmp_path: Path) -> None:
    other = record_of(tmp_path / "other", boot_id="another boot")
    write_record(boxes_folder(tmp_path / "other") / other.id, other)
    assert reap(tmp_path / "own") == []
    assert list_records(tmp_path / "other") == [other]


@given(
    same_boot=st.booleans(),
    alive=st.booleans(),
    reused=st.booleans(),
    left=st.floats(-100, 100),
    held=st.booleans(),
)
def test_a_box_stays_exactly_as_long_as_it_is_held(
    same_boot: bool, alive: bool, reused: bool, left: float, held: bool
) -> None:
    record = record_of(Path("/state"), boot_id="this", holder=77 if held else 0, holder_start=5)
    abandoned = is_abandoned(
        record,
        boot="this" if same_boot else "other",
        holder_start=(6 if reused else 5) if alive else None,
        lease_end=1000.0,
        at=1000.0 - left,
    )
    is_held = not held or (alive and not reused)
    if not same_boot or not is_held:
        assert abandoned
    elif left >= 0:
        assert not abandoned
    elif left < -2:
        assert abandoned
