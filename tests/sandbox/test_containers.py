"""Boxes by podman, from an image of the store: the same promises as with bubblewrap, where the engine can keep them."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollwright.sandbox.backends import check_backend
from rollwright.sandbox.box import BoxError, BoxLabel, BoxMount, BoxSpec, Network
from rollwright.sandbox.building import add_folder, engine_environment
from rollwright.sandbox.containers import LABEL, ContainerBackend
from rollwright.sandbox.leases import STATE_VARIABLE, boxes_folder, list_records

pytestmark = pytest.mark.boxes

OWNER = BoxLabel(rollout_id="rollout", lease_seconds=20.0)


@pytest.fixture
async def podman(
    tmp_path: Path, root_files: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ContainerBackend]:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    backend = ContainerBackend(state=str(tmp_path / "state"))
    if why := await check_backend(backend):
        pytest.skip(f"podman does not run here: {why}")
    image = await asyncio.to_thread(add_folder, backend.state, root_files, "small")
    yield backend
    await backend.aclose()
    await asyncio.to_thread(
        ask_podman, backend, "rmi", "--force", f"localhost/rollwright/{image.digest[:24]}"
    )


def ask_podman(backend: ContainerBackend, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["podman", *words], capture_output=True, text=True, env=engine_environment(backend.state)
    )


def containers(backend: ContainerBackend) -> str:
    """Containers of this state folder's boxes."""
    prefix = (
        f"name={next(iter(list_records(backend.state))).id}"
        if list_records(backend.state)
        else "name=rw-none"
    )
    done = subprocess.run(
        ["podman", "ps", "--all", "--quiet", "--filter", f"label={LABEL}", "--filter", prefix],
        capture_output=True,
        text=True,
        env=engine_environment(backend.state),
    )
    return done.stdout.strip()


async def test_a_container_runs_commands_and_is_gone(podman: ContainerBackend, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    spec = BoxSpec(image="small", memory_mb=128, mounts=(BoxMount(str(tmp_path / "shared"), "/shared"),))
    box = await podman.start(spec, OWNER)
    result = await box.run("echo out; echo err >&2; exit 3", environment={"A": "b"})
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert (await box.run(["cat"], stdin=b"given")).stdout == "given"
    assert not (await box.run("echo x > /shared/x")).ok
    await box.put(b"\0bytes", "/deep/er/file")
    assert await box.get("/deep/er/file") == b"\0bytes"
    await box.get("/deep", tmp_path / "back")
    assert (tmp_path / "back" / "er" / "file").read_bytes() == b"\0bytes"
    assert containers(podman)
    for refused in (box.fork(), box.snapshot(), box.get("/none"), box.get("/deep")):
        with pytest.raises(BoxError):
            await refused
    await box.stop()
    assert list_records(podman.state) == []
    assert box.has_ended


async def test_a_late_command_is_killed_in_the_container(podman: ContainerBackend) -> None:
    box = await podman.start(BoxSpec(image="small"), OWNER)
    result = await box.run("while :; do :; done", seconds=1.0)
    assert not result.ok


async def test_a_container_without_network_reaches_its_gateway_alone(podman: ContainerBackend) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    outside = server.sockets[0].getsockname()[1]
    spec = BoxSpec(image="small", network=Network.GATEWAY)
    box = await podman.start(spec, OWNER, gateway=f"http://127.0.0.1:{outside}")
    port = box.gateway_url.rpartition(":")[2]
    said = await box.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo hello >&3; cat <&3")
    assert said.stdout == "hello\n"
    assert not (await box.run(f"exec 3<>/dev/tcp/127.0.0.1/{outside}")).ok
    server.close()


async def test_a_container_is_gone_when_its_holder_or_its_process_is(podman: ContainerBackend) -> None:
    box = await podman.start(BoxSpec(image="small"), OWNER)
    (record,) = list_records(podman.state)
    os.kill(record.holder, signal.SIGKILL)
    for _ in range(300):
        if not (boxes_folder(podman.state) / record.id).exists():
            break
        await asyncio.sleep(0.1)
    assert list_records(podman.state) == []
    assert box.has_ended
    found = await asyncio.to_thread(ask_podman, podman, "container", "exists", record.id)
    assert found.returncode == 1


REFUSED = {
    "a mount": "mkdir -p /m && mount -t tmpfs none /m",
    "a bind mount": "mkdir -p /m && mount --bind /bin /m",
    "the sockets of container engines": "ls /run/podman/podman.sock /var/run/docker.sock /run/docker.sock",
    "the handler of core dumps": "echo x > /proc/sys/kernel/core_pattern",
    "other settings of the kernel": "echo 1 > /proc/sys/kernel/panic",
    "a reboot": "echo b > /proc/sysrq-trigger",
    "devices": "ls /dev/vda /dev/sda /dev/mem /dev/kmsg 2>/dev/null | cat; [ -e /dev/mem ] || [ -e /dev/vda ]",
    "control groups": "mkdir /sys/fs/cgroup/memory/escape",
    "files of the machine": "ls /root/.ssh /etc/shadow",
    "processes of the machine": "ls /proc/*/root/etc/shadow",
    "a server of the machine": "exec 3<>/dev/tcp/127.0.0.1/22",
}


@pytest.mark.parametrize("way", REFUSED)
async def test_no_command_in_a_container_reaches_what_is_not_its_own(
    podman: ContainerBackend, way: str
) -> None:
    box = await podman.start(BoxSpec(image="small"), OWNER)
    assert not (await box.run(REFUSED[way])).ok
