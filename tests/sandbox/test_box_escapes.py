"""Ways out of a box that are tried and must fail: mounts, devices, kernel files, other processes, other networks."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from rollwright.sandbox.box import BoxError, BoxLabel, BoxSpec, Network
from rollwright.sandbox.bubblewrap import BubblewrapBackend

LABEL = BoxLabel(rollout_id="rollout", attempt_id="attempt", lease_seconds=20.0)

REFUSED = {
    "a mount": "mkdir -p /m && mount -t tmpfs none /m",
    "a bind mount": "mkdir -p /m && mount --bind /usr /m",
    "making the programs of the machine writable": "mount -o remount,rw /usr",
    "writing to the programs of the machine": "touch /usr/bin/evil",
    "a namespace of its own": "unshare --user --map-root-user true",
    "a mount namespace of its own": "unshare --mount true",
    "another process's namespaces": "nsenter --target 1 --mount true",
    "a disk": "mknod /disk b 254 0 && head -c 1 /disk",
    "the memory of the machine": "mknod /mem c 1 1 && head -c 1 /mem",
    "devices that are there": "ls /dev/vda /dev/sda /dev/nvme0n1 /dev/mem /dev/kmsg /dev/fuse 2>/dev/null | grep .",
    "the handler of core dumps": "echo '|/bin/evil' > /proc/sys/kernel/core_pattern",
    "other settings of the kernel": "echo 1 > /proc/sys/kernel/panic",
    "a reboot": "echo b > /proc/sysrq-trigger",
    "the kernel's memory": "head -c 100 /proc/kcore | grep .",
    "control groups": "mkdir -p /c && mount -t cgroup -o memory none /c",
    "the sockets of container engines": "ls /run/docker.sock /var/run/docker.sock /run/podman/podman.sock",
    "kernel modules": "insmod /x.ko || modprobe dummy",
    "a change of the clock": "date -s 2000-01-01",
    "an escape by the root folder": "chroot /proc/1/root ls /proc/1/root/../../../root/.ssh",
}


@pytest.mark.parametrize("way", REFUSED)
async def test_no_command_reaches_what_is_not_its_own(bubblewrap: BubblewrapBackend, way: str) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    result = await box.run(REFUSED[way])
    assert not result.ok, result


async def test_no_file_of_the_machine_is_visible(bubblewrap: BubblewrapBackend, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    box = await bubblewrap.start(BoxSpec(), LABEL)
    assert not (await box.run(["cat", str(tmp_path / "secret")])).ok
    assert not (await box.run(["ls", str(bubblewrap.state)])).ok
    variables = (await box.run("env; cat /proc/1/environ | tr '\\0' '\\n'")).stdout
    for name in ("ROLLWRIGHT", "PYTEST", "VIRTUAL_ENV"):
        assert name not in variables


async def test_no_process_of_the_machine_is_visible(bubblewrap: BubblewrapBackend) -> None:
    box = await bubblewrap.start(BoxSpec(), LABEL)
    numbers = (await box.run("echo /proc/[0-9]*")).stdout.split()
    assert len(numbers) < 10
    other = await bubblewrap.start(BoxSpec(), LABEL)
    await other.run("sleep 7654 & :")
    assert "7654" not in (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout


async def test_a_box_reaches_no_server_of_the_machine(bubblewrap: BubblewrapBackend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        box = await bubblewrap.start(BoxSpec(), LABEL)
        result = await box.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}", seconds=10)
        assert not result.ok


async def test_an_abstract_socket_of_the_machine_is_not_reached(bubblewrap: BubblewrapBackend) -> None:
    name = f"rollwright-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        box = await bubblewrap.start(BoxSpec(), LABEL)
        assert name not in (await box.run("cat /proc/net/unix")).stdout


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A gateway of a test: says what was asked for."""
    first = await reader.readline()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + first)
    await writer.drain()
    writer.close()


ASK = "exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET /{path} HTTP/1.1\\r\\nHost: gateway\\r\\n\\r\\n' >&3; cat <&3"


async def test_a_box_reaches_its_own_gateway_and_nothing_else(bubblewrap: BubblewrapBackend) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    outside = server.sockets[0].getsockname()[1]
    spec = BoxSpec(network=Network.GATEWAY)
    box = await bubblewrap.start(spec, LABEL, gateway=f"http://127.0.0.1:{outside}")
    port = box.gateway_url.rpartition(":")[2]
    assert "GET /mine" in (await box.run(ASK.format(port=port, path="mine"))).stdout
    assert not (await box.run(f"exec 3<>/dev/tcp/127.0.0.1/{outside}")).ok
    without = await bubblewrap.start(BoxSpec(), LABEL)
    assert not (await without.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}")).ok
    forked = await box.fork()
    assert "GET /forked" in (await forked.run(ASK.format(port=port, path="forked"))).stdout
    with pytest.raises(BoxError, match="this attempt has none"):
        await bubblewrap.start(spec, LABEL)
    server.close()


async def test_a_proxy_refuses_hosts_that_are_not_allowed_and_addresses_that_are_not_public(
    bubblewrap: BubblewrapBackend,
) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    outside = server.sockets[0].getsockname()[1]
    spec = BoxSpec(network=Network.ALLOWLIST, allowed_hosts=("localhost", "*.example.org"))
    box = await bubblewrap.start(spec, LABEL)
    assert (await box.run("echo $https_proxy")).stdout.startswith("http://127.0.0.1:")
    ask = "exec 3<>/dev/tcp/${{http_proxy#http://127.0.0.1:}}"
    ask = "exec 3<>/dev/tcp/127.0.0.1/${http_proxy##*:}; printf 'CONNECT %s HTTP/1.1\\r\\n\\r\\n' $0 >&3; head -1 <&3"
    for target in (f"localhost:{outside}", f"127.0.0.1:{outside}", "example.com:443", "169.254.169.254:80"):
        assert "403" in (await box.run(["bash", "-c", ask, target])).stdout, target
    server.close()
