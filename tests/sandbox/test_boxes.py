"""Boxes run commands, keep files to themselves, hold their limits, and fork."""

import asyncio
import time
from pathlib import Path

import pytest

from rollwright.errors import ConfigError
from rollwright.sandbox.box import BoxError, BoxLabel, BoxMount, BoxSpec
from rollwright.sandbox.bubblewrap import BubblewrapBackend, BubblewrapBox
from rollwright.sandbox.python_box import PythonBackend

LABEL = BoxLabel(rollout_id="rollout", attempt_id="attempt", lease_seconds=20.0)


async def test_a_command_gives_its_output_its_errors_and_its_exit_code(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(environment={"GREETING": "hello"}), LABEL)
    result = await box.run("echo $GREETING; echo oops >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "hello\n", "oops\n")
    assert (await box.run(["cat"], stdin=b"given")).stdout == "given"
    assert (await box.run(["no-such-program"])).exit_code == 127
    assert (await box.run("kill -9 $$")).exit_code == 137
    assert (await box.run("pwd", workdir="/tmp")).stdout == "/tmp\n"


async def test_users_of_the_image_run_commands(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    assert (await box.run("id -u; echo $HOME")).stdout == "0\n/root\n"
    if (await box.run("id -u", user="agent")).stdout != "1000\n":
        pytest.skip("this user has no further user ids (/etc/subuid)")
    assert not (await box.run("touch /etc/x", user="agent")).ok
    with pytest.raises(BoxError, match="no user 'nope'"):
        await box.run("true", user="nope")


async def test_a_late_command_is_killed_with_its_children_and_the_box_lives_on(
    bubblewrap: BubblewrapBackend,
) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    result = await box.run("echo begun; sleep 1234 & sleep 1234", seconds=0.3)
    assert result.is_late
    assert not result.ok
    assert result.stdout == "begun\n"
    assert (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 1234'")).stdout == "0\n"


async def test_a_cancelled_command_is_killed(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    running = asyncio.create_task(box.run("touch /begun; sleep 1234"))
    while not (await box.run("test -e /begun")).ok:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep '[s]leep 1234'")).ok:
        await asyncio.sleep(0.01)


async def test_a_server_that_a_command_starts_lives_on_and_does_not_hold_the_command(
    bubblewrap: BubblewrapBackend,
) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    result = await box.run("(while :; do date > /alive; sleep 0.05; done) & echo started")
    assert result.stdout == "started\n"
    assert (await box.run("rm -f /alive; sleep 0.3; test -e /alive")).ok


async def test_long_output_keeps_its_begin_and_its_end(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    result = await box.run("echo first; head -c 5000000 /dev/zero; echo last", max_output=1000)
    assert result.stdout.startswith("first\n")
    assert result.stdout.endswith("last\n")
    assert result.dropped == 5_000_000 + len("first\nlast\n") - 1000


async def test_a_command_of_any_length_arrives(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    text = "x" * 100_000
    assert (await box.run(["sh", "-c", "printf %s $0 $1 | wc -c", text, text])).stdout.strip() == "200000"


async def test_files_go_in_and_come_out(bubblewrap: BubblewrapBackend, tmp_path: Path) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    await box.put(b"\0\xffbytes", "/deep/er/file")
    assert await box.get("/deep/er/file") == b"\0\xffbytes"
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "inner" / "a").write_text("a")
    await box.put(source, "/copied")
    assert (await box.run(["/copied/run.sh"])).stdout == "ran\n"
    await box.get("/copied", tmp_path / "back")
    assert (tmp_path / "back" / "inner" / "a").read_text() == "a"
    await box.get("/copied/run.sh", tmp_path / "one.sh")
    assert (tmp_path / "one.sh").read_text().endswith("ran\n")
    for path, why in (("/none", "No such file"), ("/copied", "is not a file"), ("relative", "absolute")):
        with pytest.raises(BoxError, match=why):
            await box.get(path)


async def test_links_that_lead_out_of_a_folder_do_not_leave_the_box(
    bubblewrap: BubblewrapBackend, tmp_path: Path
) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    await box.run("mkdir /d; ln -s /etc/passwd /d/link; ln -s ../../outside /d/up; echo ok > /d/file")
    await box.get("/d", tmp_path / "d")
    assert (tmp_path / "d" / "file").read_text() == "ok\n"
    assert not (tmp_path / "d" / "link").exists()
    assert not (tmp_path / "d" / "up").is_symlink()


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


async def test_many_boxes_start_and_run_at_the_same_time(bubblewrap: BubblewrapBackend) -> None:
    async def play(number: int) -> str:
        box: BubblewrapBox = await bubblewrap.start(BoxSpec(), LABEL)
        await box.run(f"echo {number} > /n")
        return (await box.run("cat /n")).stdout

    assert await asyncio.gather(*map(play, range(12))) == [f"{number}\n" for number in range(12)]


async def test_a_box_that_ended_says_so(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    await box.stop()
    await box.stop()
    assert box.has_ended
    with pytest.raises(BoxError, match="has ended"):
        await box.run("true")


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
