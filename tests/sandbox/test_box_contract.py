"""What every backend of boxes promises, tried on each one: commands, time limits, files, leases, ways out.

Pods and hosted sandboxes run against the simulated services of this package, which run their commands in real boxes.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.box import Box, BoxBackend, BoxError, BoxLabel, BoxMount, BoxSpec, Network
from rollwright.sandbox.building import add_folder, engine_environment
from rollwright.sandbox.leases import STATE_VARIABLE, list_records
from rollwright.simulation.e2b_server import SimulatedE2B
from rollwright.simulation.kubernetes_server import SimulatedCluster

LABEL = BoxLabel(rollout_id="rollout", attempt_id="attempt", lease_seconds=20.0)
PATIENCE = 30.0
IMAGE = "debian"


class Tried(NamedTuple):
    """One backend in a test."""

    name: str
    backend: BoxBackend
    spec: BoxSpec
    options: dict[str, Any]
    service: Any = None

    async def start(self, **changes: Any) -> Box:
        gateway = changes.pop("gateway", "")
        return await self.backend.start(self.spec.replace(**changes), LABEL, gateway=gateway)

    def running(self) -> int:
        """Boxes that exist outside this process."""
        if isinstance(self.service, SimulatedCluster):
            return len(self.service.pods)
        if isinstance(self.service, SimulatedE2B):
            return len(self.service.sandboxes)
        return len(list_records(Path(self.options["state"])))


async def _service_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    state = folder / "service"
    if name == "kubernetes":
        cluster = SimulatedCluster({IMAGE: BoxSpec()}, state=state)
        await cluster.start()
        return cluster, {"kubeconfig": str(cluster.write_kubeconfig(folder / "kubeconfig"))}
    if name == "e2b":
        hosted = SimulatedE2B({IMAGE: BoxSpec(memory_mb=256)}, state=state)
        await hosted.start()
        monkeypatch.setenv("E2B_API_KEY", hosted.key)
        return hosted, {"api_url": hosted.url, "sandbox_url": hosted.url, "http_version": "1.1"}
    return None, {}


@pytest.fixture(params=["bubblewrap", "kubernetes", "e2b", pytest.param("podman", marks=pytest.mark.boxes)])
async def tried(
    request: pytest.FixtureRequest, tmp_path: Path, root_files: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Tried]:
    name = request.param
    own = tmp_path / "state"
    monkeypatch.setenv(STATE_VARIABLE, str(own))
    probe = make_backend("podman" if name == "podman" else "bubblewrap", state=str(tmp_path / "probe"))
    why = await check_backend(probe)
    await probe.aclose()
    if why:
        pytest.skip(f"{name} does not run here: {why}")
    service, options = await _service_of(name, tmp_path, monkeypatch)
    options["state"] = str(own)
    backend = make_backend(name, **options)
    assert await check_backend(backend) == ""
    spec = BoxSpec(memory_mb=256, image=IMAGE) if service is not None else BoxSpec(memory_mb=256)
    if name == "podman":
        image = await asyncio.to_thread(add_folder, own, root_files, "small")
        spec = spec.replace(image="small")
        given = f"localhost/rollwright/{image.digest[:24]}"
    try:
        yield Tried(name, backend, spec, options, service)
    finally:
        await backend.aclose()
        if service is not None:
            await service.close()
        if name == "podman":
            words, place = ["podman", "rmi", "--force", given], engine_environment(own)
            await asyncio.to_thread(subprocess.run, words, capture_output=True, env=place)


async def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, "not within the time that a busy machine may take"
        await asyncio.sleep(0.05)


async def test_a_command_gives_its_output_its_errors_and_its_exit_code(tried: Tried) -> None:
    box = await tried.start(environment={"GREETING": "hello $HOME"})
    result = await box.run("echo $GREETING; echo oops >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "hello $HOME\n", "oops\n")
    assert (await box.run(["cat"], stdin=b"given\n" * 30_000)).stdout == "given\n" * 30_000
    assert (await box.run(["no-such-program"])).exit_code == 127
    assert (await box.run("kill -9 $$")).exit_code == 137
    assert (await box.run("pwd", workdir="/tmp")).stdout == "/tmp\n"
    assert (await box.run(["echo", "it's", "a b", "$X"], environment={"X": "no"})).stdout == "it's a b $X\n"
    await box.stop()
    await box.stop()
    assert box.has_ended
    with pytest.raises(BoxError, match="has ended"):
        await box.run("true")
    await until(lambda: tried.running() == 0)


async def test_users_of_the_image_run_commands(tried: Tried) -> None:
    box = await tried.start()
    if tried.name == "podman":
        assert (await box.run("echo $HOME", user="root")).stdout == "/root\n"
        return
    assert (await box.run("id -u; echo $HOME", user="root")).stdout == "0\n/root\n"
    if (await box.run("id -u", user="agent")).stdout != "1000\n":
        pytest.skip("this user has no further user ids (/etc/subuid)")
    assert (await box.run("echo $HOME; id -G", user="agent")).stdout == "/home/agent\n1000\n"
    assert not (await box.run("touch /etc/x", user="agent")).ok
    with pytest.raises(BoxError, match="nope"):
        await box.run("true", user="nope")


async def test_a_late_command_is_killed_with_its_children_and_the_box_lives_on(tried: Tried) -> None:
    box = await tried.start()
    result = await box.run("echo begun; sleep 1234 & sleep 1234", seconds=1.0)
    assert not result.ok
    assert result.exit_code == 137
    if tried.name != "podman":
        assert result.is_late
        assert result.stdout == "begun\n"
        seen = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 1234'"
        assert (await box.run(seen)).stdout == "0\n"
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_a_cancelled_command_is_killed(tried: Tried) -> None:
    if tried.name == "podman":
        pytest.skip("a cancelled command of podman lives until its time limit")
    box = await tried.start()
    running = asyncio.create_task(box.run("touch /tmp/begun; sleep 1234"))
    while not (await box.run("test -e /tmp/begun")).ok:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep '[s]leep 1234'")).ok:
        await asyncio.sleep(0.01)


async def test_a_server_that_a_command_starts_lives_on_and_does_not_hold_the_command(tried: Tried) -> None:
    box = await tried.start()
    held = "(while :; do echo tick; echo x > /tmp/alive; sleep 0.05; done) & echo started"
    if tried.name == "podman":
        held = held.replace(") &", ") >/dev/null 2>&1 &")
    result = await box.run(held)
    assert "started\n" in result.stdout
    assert (await box.run("rm -f /tmp/alive; sleep 0.5; test -e /tmp/alive")).ok


async def test_long_output_keeps_its_begin_and_its_end(tried: Tried) -> None:
    box = await tried.start()
    write = "i=0; while [ $i -lt 2000 ]; do echo 0123456789012345678901234567890123456789; i=$((i+1)); done"
    result = await box.run(f"echo first; {write}; echo last", max_output=1000)
    assert result.stdout.startswith("first\n")
    assert result.stdout.endswith("last\n")
    assert result.dropped == 2000 * 41 + len("first\nlast\n") - 1000


async def test_a_command_of_any_length_arrives(tried: Tried) -> None:
    box = await tried.start()
    text = "x" * 100_000
    result = await box.run(["sh", "-c", "echo ${#0} ${#1}", text, text])
    assert result.stdout.strip() == "100000 100000"


async def test_files_go_in_and_come_out(tried: Tried, tmp_path: Path) -> None:
    box = await tried.start()
    content = bytes(range(256)) * 2000
    await box.put(content, "/deep/er/file")
    assert await box.get("/deep/er/file") == content
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
    for path, why in (("/none", "o such file"), ("/copied", "is not a file"), ("relative", "absolute")):
        with pytest.raises(BoxError, match=None if tried.name == "podman" else why):
            await box.get(path)


async def test_links_that_lead_out_of_a_folder_do_not_leave_the_box(tried: Tried, tmp_path: Path) -> None:
    box = await tried.start()
    made = await box.run(
        [
            "bash",
            "-c",
            "mkdir /tmp/d; echo ok > /tmp/d/file; "
            + (
                ":"
                if tried.name == "podman"
                else "ln -s /etc/passwd /tmp/d/link; ln -s ../../outside /tmp/d/up"
            ),
        ]
    )
    assert made.ok
    await box.get("/tmp/d", tmp_path / "d")
    assert (tmp_path / "d" / "file").read_text() == "ok\n"
    assert not (tmp_path / "d" / "link").exists()
    assert not (tmp_path / "d" / "up").is_symlink()


async def test_what_a_backend_does_not_have_is_refused_by_name(tried: Tried, tmp_path: Path) -> None:
    if tried.name == "bubblewrap":
        pytest.skip("it has everything")
    for changes in (
        {"image": "host"},
        {"folder": str(tmp_path)},
        {"network": Network.GATEWAY},
        *(
            []
            if tried.name == "podman"
            else [{"mounts": (BoxMount(str(tmp_path), "/m"),)}, {"network_of": "x"}]
        ),
    ):
        with pytest.raises(BoxError):
            await tried.start(**changes)
    with pytest.raises(BoxError, match="none-such"):
        await tried.start(image="none-such")
    box = await tried.start()
    for refused in (box.fork(), box.snapshot()):
        with pytest.raises(BoxError, match=f"the backend {tried.name} cannot"):
            await refused


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A gateway of a test: says what was asked for, and a long answer."""
    first = await reader.readline()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + first + b"x" * 300_000)
    await writer.drain()
    writer.close()


ASK = "exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET /{path} HTTP/1.1\\r\\nHost: gateway\\r\\n\\r\\n' >&3; cat <&3"


async def test_a_box_reaches_the_gateway_of_its_own_attempt_and_no_other(tried: Tried) -> None:
    """Two rollouts, each with a gateway: neither reaches the other's, by the address inside, outside, or its proxy."""
    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    ports = [each.sockets[0].getsockname()[1] for each in servers]
    boxes = [await tried.start(network=Network.GATEWAY, gateway=f"http://127.0.0.1:{port}") for port in ports]
    inside = boxes[0].gateway_url.rpartition(":")[2]
    for n, box in enumerate(boxes):
        seen = await box.run(ASK.format(port=inside, path=f"rollout{n}"))
        assert f"GET /rollout{n}" in seen.stdout
        assert seen.stdout.endswith("x" * 1000)
        for port in ports:
            assert not (await box.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}", seconds=20)).ok
    without = await tried.start()
    assert not (await without.run(f"exec 3<>/dev/tcp/127.0.0.1/{inside}", seconds=20)).ok
    await boxes[0].stop()
    assert "GET /still" in (await boxes[1].run(ASK.format(port=inside, path="still"))).stdout
    for server in servers:
        server.close()


async def test_a_box_with_the_key_of_another_rollout_cannot_use_it(tried: Tried) -> None:
    """One gateway serves both rollouts, and the attacker knows the other's address and key."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    place = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    box = await tried.start(network=Network.GATEWAY, gateway=f"{place}/rollouts/mine/v1")
    port = box.gateway_url.rpartition(":")[2]
    send = "exec 3<>/dev/tcp/127.0.0.1/{port}; printf '{request}' >&3; cat <&3"
    key = "Authorization: Bearer key-of-the-other\\r\\nHost: g\\r\\n"
    own = f"POST /rollouts/mine/v1/messages HTTP/1.1\\r\\n{key}Content-Length: 2\\r\\n\\r\\nhi"
    assert "POST /rollouts/mine/v1/messages" in (await box.run(send.format(port=port, request=own))).stdout
    for target in (
        "/rollouts/other/v1/messages",
        "/rollouts/mine/../other/v1/messages",
        f"{place}/rollouts/other/v1/messages",
        "/rollouts",
        "//rollouts/other/v1/messages",
    ):
        request = f"POST {target} HTTP/1.1\\r\\n{key}Content-Length: 0\\r\\n\\r\\n"
        for given in (request, own + request):  # also behind a request of its own
            seen = (await box.run(send.format(port=port, request=given))).stdout
            # Behind a request of its own the gateway may have answered and ended the connection before the refusal.
            assert "403 Forbidden" in seen or (given != request and "POST /rollouts/mine" in seen), (
                target,
                seen[:200],
            )
            assert "other" not in seen
    server.close()


async def test_a_proxy_refuses_hosts_that_are_not_allowed_and_addresses_that_are_not_public(
    tried: Tried,
) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    outside = server.sockets[0].getsockname()[1]
    box = await tried.start(network=Network.ALLOWLIST, allowed_hosts=("localhost", "*.example.org"))
    assert (await box.run("echo $https_proxy")).stdout.startswith("http://127.0.0.1:")
    ask = (
        "exec 3<>/dev/tcp/127.0.0.1/${http_proxy##*:}; printf 'CONNECT %s HTTP/1.1\\r\\n\\r\\n' $0 >&3; "
        "IFS= read -r line <&3; echo $line"
    )
    for target in (f"localhost:{outside}", f"127.0.0.1:{outside}", "example.com:443", "169.254.169.254:80"):
        assert "403" in (await box.run(["bash", "-c", ask, target])).stdout, target
    server.close()


async def test_many_boxes_start_and_run_at_the_same_time(tried: Tried) -> None:
    async def play(number: int) -> str:
        box = await tried.start()
        await box.run(f"echo {number} > /tmp/n")
        return (await box.run("cat /tmp/n")).stdout

    count = 3 if tried.name == "podman" else 6
    assert await asyncio.gather(*map(play, range(count))) == [f"{number}\n" for number in range(count)]


async def test_the_memory_of_a_box_is_limited(tried: Tried) -> None:
    if tried.name in ("podman",):
        pytest.skip("the small image of this test has no program that takes memory")
    box = await tried.start(memory_mb=64) if tried.name != "e2b" else await tried.start()
    result = await box.run("x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#x}")
    assert not result.ok
    assert (await box.run("echo alive")).stdout == "alive\n"


HOLDING = """
import asyncio, json, sys
from rollwright.sandbox.backends import make_backend
from rollwright.sandbox.box import BoxLabel, BoxSpec

async def hold():
    backend = make_backend(sys.argv[1], **json.loads(sys.argv[2]))
    label = BoxLabel(rollout_id="r", lease_seconds=float(sys.argv[4]))
    for _ in range(2):
        box = await backend.start(BoxSpec(image=sys.argv[3], memory_mb=256), label)
        await box.run("sleep 4321 >/dev/null 2>&1 & :")
    print("held", flush=True)
    await asyncio.sleep(1000)

asyncio.run(hold())
"""


async def hold_boxes(tried: Tried, lease: float) -> "subprocess.Popen[bytes]":
    process = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", HOLDING, tried.name, json.dumps(tried.options), tried.spec.image, str(lease)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"held\n"
    assert tried.running() == 2
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_boxes_are_gone_when_their_process_is_killed_or_stands_still(
    tried: Tried, how: signal.Signals
) -> None:
    process = await hold_boxes(tried, lease=3.0)
    try:
        os.kill(process.pid, how)
        await until(lambda: tried.running() == 0)
        await until(lambda: list_records(Path(tried.options["state"])) == [])
    finally:
        process.kill()
        process.wait()
