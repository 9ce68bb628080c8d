"""Boxes run commands, keep files to themselves, hold their limits, and fork."""

import time
from pathlib import Path

import pytest

from rollwright.errors import ConfigError
from rollwright.sandbox.box import BoxError, BoxLabel, BoxMount, BoxSpec
from rollwright.sandbox.bubblewrap import BubblewrapBackend
from rollwright.sandbox.python_box import PythonBackend

LABEL = BoxLabel(rollout_id="rollout", attempt_id="attempt", lease_seconds=20.0)


async def test_a_mounted_folder_is_read_only_unless_the_spec_says_otherwise(
    bubblewrap: BubblewrapBackend, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    mounts = (
        BoxMount(str(tmp_path / "in"), "/in"),
        BoxMount(str(tmp_path / "out"), "/out", read_only=False),
    )
    box = await bubblewrap.start(BoxSpec(mounts=mounts), LABEL)
    assert not (await box.run("touch /in/x")).ok
    assert (await box.run("echo y > /out/y")).ok
    assert (tmp_path / "out" / "y").read_text() == "y\n"


async def test_a_box_starts_over_a_folder_and_does_not_change_it(
    bubblewrap: BubblewrapBackend, tmp_path: Path
) -> None:
    from rollwright.sandbox.images import host_image

    skeleton, mounts = host_image(bubblewrap.state)
    before = sorted(each.name for each in skeleton.iterdir())
    box = await bubblewrap.start(BoxSpec(folder=str(skeleton), mounts=mounts), LABEL)
    assert (await box.run("rm -rf /home /etc/passwd; echo new > /new; ls /new")).ok
    assert sorted(each.name for each in skeleton.iterdir()) == before
    assert (skeleton / "etc" / "passwd").exists()
    with pytest.raises(ConfigError, match="is not a folder"):
        await bubblewrap.start(BoxSpec(folder=str(tmp_path / "none")), LABEL)
    with pytest.raises(ConfigError, match="is not in the store; known: host"):
        await bubblewrap.start(BoxSpec(image="debian"), LABEL)


async def test_memory_processes_and_disk_are_limited(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(memory_mb=64, processes=24, disk_mb=4), LABEL)
    eaten = await box.run("x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo survived")
    assert "survived" not in eaten.stdout
    forked = await box.run(
        "for i in $(seq 60); do sleep 1 & done 2>&1; wait; echo done", seconds=20, max_output=4096
    )
    assert "fork" in forked.stdout + forked.stderr
    assert "No space left" in (await box.run("head -c 9000000 /dev/zero > /big")).stderr
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_a_fork_has_the_files_and_goes_its_own_way(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    await box.run("echo one > /kept; rm /etc/hostname; rm -r /opt; mkdir -p /opt/new")
    assert await box.fork_note() == ""
    other = await box.fork()
    await box.run("echo two > /kept")
    seen = await other.run("cat /kept; ls /opt; test -e /etc/hostname || echo gone")
    assert seen.stdout == "one\nnew\ngone\n"
    await other.run("echo three > /kept")
    assert (await box.run("cat /kept")).stdout == "two\n"
    await box.stop()
    assert (await other.run("cat /kept")).stdout == "three\n"


async def test_a_fork_says_that_processes_are_not_copied(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    await box.run("sleep 1234 & :")
    assert "1 processes that run in the box are not copied" in await box.fork_note()
    other = await box.fork()
    assert "sleep" not in (await other.run("cat /proc/[0-9]*/comm")).stdout


async def test_a_fork_of_a_box_with_a_limited_disk_has_its_files(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(disk_mb=8), LABEL)
    await box.run("echo kept > /file")
    assert (await (await box.fork()).run("cat /file")).stdout == "kept\n"


async def test_boxes_share_the_layer_of_a_snapshot_also_of_a_snapshot(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    await box.run("echo a > /a")
    first = await box.snapshot()
    await box.stop()
    middle = await bubblewrap.start(first.spec, LABEL)
    await middle.run("echo b > /b; rm /a")
    second = await middle.snapshot()
    last = await bubblewrap.start(second.spec, LABEL)
    assert (await last.run("cat /b; test -e /a || echo gone")).stdout == "b\ngone\n"
    again = await bubblewrap.start(first.spec, LABEL)
    assert (await again.run("ls /a /b 2>/dev/null")).stdout == "/a\n"
    for each in (middle, last, again):
        await each.stop()
    await second.delete()
    await first.delete()
    assert not any((bubblewrap.state / "boxes").iterdir())


def test_a_spec_that_cannot_be_is_refused() -> None:
    for wrong, message in (
        ({"memory_mb": 0}, "memory_mb must be more than 0"),
        ({"cpus": -1}, "cpus must not be negative"),
        ({"allowed_hosts": ("a",)}, "allowed_hosts is for the network allowlist"),
        ({"mounts": (BoxMount("/x", "/a/../.."),)}, "a mount needs an absolute path"),
    ):
        with pytest.raises(ConfigError, match=message):
            BoxSpec(**wrong)  # type: ignore[arg-type]


async def test_the_python_sandbox_is_a_box_for_python_code() -> None:
    backend = PythonBackend()
    if why := await backend.find_obstacle():
        pytest.skip(why)
    try:
        box = await backend.start(BoxSpec(memory_mb=256), LABEL)
        assert (await box.run(["python", "-c", "x = 6 * 7\nprint(x)"])).stdout == "42\n"
        assert (await box.run(["python", "-"], stdin=b"print(x + 1)")).stdout == "43\n"
        assert "ZeroDivisionError" in (await box.run(["python", "-c", "1/0"])).stderr
        await box.put(b"\0bytes", "/tmp/d/file")
        assert await box.get("/tmp/d/file") == b"\0bytes"
        for refused in (box.run("ls"), box.fork(), backend.start(BoxSpec(image="debian"), LABEL)):
            with pytest.raises(BoxError, match="the backend process"):
                await refused
        began = time.monotonic()
        assert (await box.run(["python", "-c", "while True: pass"], seconds=0.2)).is_late
        assert time.monotonic() - began < 10
        await box.stop()
    finally:
        await backend.aclose()
