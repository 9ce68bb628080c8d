"""Pods and hosted sandboxes: what they are made of, what ends them when their worker's machine is lost, and what they say."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.box import BoxError, BoxLabel, BoxSpec, Network
from rollwright.sandbox.e2b_box import E2BBackend
from rollwright.sandbox.kubernetes_box import KubernetesBackend
from rollwright.sandbox.kubernetes_objects import BOX_LABEL, network_policy, pod_manifest
from rollwright.sandbox.leases import count_local_boxes, list_records
from rollwright.sandbox.pool import BoxPool
from rollwright.sandbox.settings import SANDBOXES
from rollwright.sandbox.shell_box import MarkedStream
from rollwright.simulation.e2b_server import SimulatedE2B
from rollwright.simulation.kubernetes_server import SimulatedCluster, SimulatedPod

LABEL = BoxLabel(rollout_id="rollout", attempt_id="attempt", worker="worker", lease_seconds=20.0)
SPEC = BoxSpec(image="debian", memory_mb=128, cpus=1.5, disk_mb=64)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[SimulatedCluster]:
    probe = make_backend("bubblewrap", state=str(tmp_path / "probe"))
    why = await check_backend(probe)
    await probe.aclose()
    if why:
        pytest.skip(f"the simulated cluster does not run here: {why}")
    made = SimulatedCluster({"debian": BoxSpec()}, state=tmp_path / "cluster")
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def pods(cluster: SimulatedCluster, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    file = cluster.write_kubeconfig(tmp_path / "kubeconfig")
    backend = KubernetesBackend(kubeconfig=str(file), state=str(tmp_path / "state"), start_seconds=20.0)
    yield backend
    await backend.aclose()


async def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not is_true():
        assert time.monotonic() < deadline, "not within the time that a busy machine may take"
        await asyncio.sleep(0.05)


@given(
    content=st.lists(st.binary(max_size=40), max_size=6),
    code=st.integers(0, 255),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_a_mark_is_found_however_a_stream_is_cut(content: list[bytes], code: int, cuts: list[int]) -> None:
    mark = "0123456789abcdef"
    before = b"".join(content) + mark[:7].encode()
    stream = before + f"{mark} {code}\n".encode() + b"written later"
    found, at = MarkedStream(mark), 0
    given_out = b""
    for cut in [*sorted(min(each, len(stream)) for each in cuts), len(stream)]:
        given_out += found.add(stream[at:cut])
        at = cut
    assert (given_out, found.exit_code) == (before, code)


def test_a_pod_has_the_limits_of_its_box_and_no_rights_in_the_cluster() -> None:
    pod = pod_manifest(SPEC, LABEL, "name", max_seconds=100, runtime_class="gvisor", pull_secrets=("key",))
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"memory": "128Mi", "cpu": "1.5", "ephemeral-storage": "64Mi"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 100
    assert (spec["runtimeClassName"], spec["imagePullSecrets"]) == ("gvisor", [{"name": "key"}])
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    assert "SYS_ADMIN" not in context["capabilities"]["add"]
    assert not any(spec.get(each) for each in ("hostNetwork", "hostPID", "hostIPC"))
    assert [list(each) for each in spec["volumes"]] == [["name", "emptyDir"]]
    assert pod["metadata"]["annotations"]["rollwright.dev/rollout-id"] == "rollout"


def test_a_public_pod_reaches_no_private_address() -> None:
    assert network_policy("closed")["spec"]["egress"] == []
    allowed, names = network_policy("public")["spec"]["egress"]
    assert "169.254.0.0/16" in allowed["to"][0]["ipBlock"]["except"]
    assert {each["port"] for each in names["ports"]} == {53}


async def test_a_policy_without_egress_selects_every_pod_that_is_not_public(
    cluster: SimulatedCluster, pods: KubernetesBackend
) -> None:
    closed = await pods.start(SPEC, LABEL)
    public = await pods.start(SPEC.replace(network=Network.PUBLIC), LABEL)
    assert cluster.is_closed(cluster.pods[closed.id])
    assert not cluster.is_closed(cluster.pods[public.id])


async def test_remote_boxes_are_listed_and_take_no_room_on_this_machine(
    cluster: SimulatedCluster, pods: KubernetesBackend, tmp_path: Path
) -> None:
    box = await pods.start(SPEC, LABEL)
    (record,) = list_records(tmp_path / "state")
    assert (record.id, record.backend, record.label.rollout_id) == (box.id, "kubernetes", "rollout")
    assert count_local_boxes(tmp_path / "state") == 0
    assert cluster.pods[box.id].labels[BOX_LABEL] == box.id


async def test_only_boxes_elsewhere_are_free_of_this_machines_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.sandbox.pool.may_start", lambda **_: False)
    kinds = {name: make_backend(name) for name in SANDBOXES.kinds}
    free = set()
    for name, backend in kinds.items():
        pool = BoxPool(backend)
        await pool.backend()
        free |= {name} if pool._has_room(SPEC) else set()
    assert free == {"kubernetes", "e2b"}


LOST = """
import asyncio, os, signal, sys
from rollwright.sandbox.box import BoxLabel, BoxSpec
from rollwright.sandbox.kubernetes_box import KubernetesBackend
from rollwright.sandbox.leases import list_records

async def lose():
    backend = KubernetesBackend(kubeconfig=sys.argv[1], state=sys.argv[2])
    await backend.start(BoxSpec(image="debian"), BoxLabel(lease_seconds=2.0))
    for each in list_records(backend.state):
        os.kill(each.holder, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(lose())
"""


async def test_a_pod_ends_by_itself_when_the_machine_of_its_worker_is_lost(
    cluster: SimulatedCluster, pods: KubernetesBackend, tmp_path: Path
) -> None:
    """Worker and holder are gone at once, as with a loss of power; the pod's own first process is all that is left."""
    file, state = tmp_path / "kubeconfig", tmp_path / "lost"
    cluster.write_kubeconfig(file)
    lost = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", LOST, str(file), str(state)])
    assert lost.returncode == -signal.SIGKILL
    (pod,) = cluster.pods.values()
    assert pod.body["status"]["phase"] == "Running"
    await until(lambda: pod.body["status"]["phase"] == "Succeeded")
    for record in list_records(state):
        os.kill(record.holder, signal.SIGKILL)
    stranger = SimulatedPod(
        {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}, "default"
    )
    stranger.set_phase("Succeeded", {"terminated": {"exitCode": 0}})
    cluster.pods["x"] = stranger
    mine = await pods.start(SPEC, LABEL)  # any process that uses pods removes finished ones
    await until(lambda: set(cluster.pods) == {"x", mine.id})


async def test_what_a_cluster_refuses_is_told_in_one_line(
    cluster: SimulatedCluster, pods: KubernetesBackend, tmp_path: Path
) -> None:
    with pytest.raises(BoxError, match='ErrImagePull: failed to pull image "none"'):
        await pods.start(SPEC.replace(image="none"), LABEL)
    cluster.forbidden.add("pods")
    with pytest.raises(BoxError, match="create pod: pods is forbidden"):
        await pods.start(SPEC, LABEL)
    wrong = cluster.write_kubeconfig(tmp_path / "wrong", token="other")
    for options, why in (
        ({"kubeconfig": str(wrong)}, "list pods in default: Unauthorized"),
        ({"kubeconfig": str(tmp_path / "none")}, "no cluster: .*set KUBECONFIG"),
        ({"kubeconfig": str(wrong), "context": "nope"}, "no cluster: "),
    ):
        backend = KubernetesBackend(state=str(tmp_path / "other"), **options)
        obstacle = await backend.find_obstacle()
        await backend.aclose()
        assert "\n" not in obstacle
        assert re.search(why, obstacle), obstacle
    await until(lambda: list_records(tmp_path / "state") == [])


async def test_a_pod_that_is_deleted_by_others_says_that_the_box_has_ended(
    cluster: SimulatedCluster, pods: KubernetesBackend
) -> None:
    box = await pods.start(SPEC, LABEL)
    await cluster._remove(box.id)
    with pytest.raises(BoxError, match="has ended"):
        await box.run("true")
    await box.stop()


async def test_what_e2b_refuses_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SimulatedE2B({"base": BoxSpec()}, state=tmp_path / "service")
    await service.start()
    backend = E2BBackend(
        api_url=service.url, sandbox_url=service.url, http_version="1.1", state=str(tmp_path / "s")
    )
    try:
        monkeypatch.delenv("E2B_API_KEY", raising=False)
        assert "E2B_API_KEY is not set" in await backend.find_obstacle()
        monkeypatch.setenv("E2B_API_KEY", "wrong")
        assert "Invalid API key" in await backend.find_obstacle()
        monkeypatch.setenv("E2B_API_KEY", service.key)
        assert await backend.find_obstacle() == ""
        with pytest.raises(BoxError, match="template 'none' not found"):
            await backend.start(SPEC.replace(image="none"), LABEL)
        await until(lambda: list_records(tmp_path / "s") == [])
    finally:
        await backend.aclose()
        await service.close()
