"""Boxes as pods of a Kubernetes cluster, through the PyPI client `kubernetes-asyncio`.

A box is a pod with one container. Commands, files and the gateway go through `exec` over a websocket
(`rollwright.sandbox.shell_box`), so a pod needs no address of this machine.

Always true, whatever is killed:
- The box's holder on this machine (`rollwright.sandbox.holder`) deletes the pod when the process or its lease ends.
- The pod's first process ends the pod when its lease is not renewed, which an `exec` stream of this process does. That needs
  no process of this package anywhere, and covers the loss of this machine.
- `activeDeadlineSeconds` bounds the life of a pod whose first process was tampered with.
- Every process that uses pods deletes finished ones that carry this package's label, and never others.

Networks `none`, `gateway` and `allowlist` are a NetworkPolicy that lets nothing in or out; the cluster's network plugin must
enforce it. Not promised: `processes` (the kubelet's setting), protection from faults of the node's kernel.
"""

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollwright.errors import ConfigError
from rollwright.sandbox.box import HOST_IMAGE, BoxError, BoxLabel, BoxSpec, Feature, Network
from rollwright.sandbox.holder_client import HolderLine, HolderPool, own_process
from rollwright.sandbox.kubernetes_cluster import Cluster, PodConflict
from rollwright.sandbox.kubernetes_objects import BOX_LABEL, LIFELINE, network_policy, pod_manifest, state_of
from rollwright.sandbox.leases import (
    BoxRecord,
    boot_id,
    boxes_folder,
    new_box_id,
    read_record,
    rewrite_record,
    state_folder,
)
from rollwright.sandbox.messages import HoldRequest
from rollwright.sandbox.shell_box import ShellBox, ShellStream

_RENEWALS_PER_LEASE = 4
_POLL_SECONDS = 0.2
_REAP_SECONDS = 30.0
_PENDING_SECONDS = 3600.0
"""Age from which a pod that never ran counts as left behind; clocks of two machines differ by less."""

_KEPT_VARIABLES = (
    "KUBECONFIG",
    "HOME",
    "PATH",
    "PYTHONPATH",
    "KUBERNETES_",
    "HTTP",
    "http",
    "NO_PROXY",
    "no_proxy",
)

_AS_USER = r"""
u=$0; name=; while IFS=: read -r n _ i g _ h _; do
  if [ "$n" = "$u" ] || [ "$i" = "$u" ]; then name=$n uid=$i gid=$g home=$h; break; fi
done </etc/passwd
if [ -z "$name" ]; then case $u in
  *[!0-9]*) echo "no user '$u' in /etc/passwd" >&2; exit 125;;
  *) uid=$u gid=0 home=/; [ "$u" = 0 ] && home=/root;;
esac; fi
export HOME="$home" USER="${name:-$u}"
if [ "$uid" = "$(id -u)" ]; then eval "$1"; exit; fi
if [ "$(id -u)" != 0 ]; then echo "the image runs as another user than root, so commands cannot be run as '$u'" >&2; exit 125; fi
if command -v setpriv >/dev/null 2>&1; then
  if [ -n "$name" ]; then exec setpriv --reuid "$uid" --regid "$gid" --init-groups sh -c "$1"; fi
  exec setpriv --reuid "$uid" --regid "$gid" --clear-groups sh -c "$1"
fi
exec su -s /bin/sh "${name:-$u}" -c "$1"
"""
"""Becomes another user, found in the files of the image: `exec` has no way to name one."""


class KubernetesBackend:
    """Starts pods. Belongs to one event loop."""

    name = "kubernetes"
    features = frozenset({Feature.COMMANDS, Feature.IMAGES, Feature.GATEWAY, Feature.NETWORK, Feature.REMOTE})

    def __init__(
        self,
        *,
        kubeconfig: str = "",
        context: str = "",
        namespace: str = "",
        runtime_class: str = "",
        node_selector: dict[str, str] | None = None,
        pull_secrets: list[str] | None = None,
        start_seconds: float = 300.0,
        max_seconds: int = 86_400,
        state: str = "",
    ) -> None:
        """`kubeconfig`, `context`, `namespace`: empty: those of the machine. `start_seconds`: time for a pod to be scheduled and its
        image fetched. `max_seconds`: longest life of a pod. `state`: folder of the records of boxes; empty: the user's."""
        if max_seconds < 1 or start_seconds <= 0:
            raise ConfigError("max_seconds and start_seconds must be more than 0")
        self.state = Path(state).absolute() if state else state_folder()
        self.holders = HolderPool(self.state)
        self.boxes: set[KubernetesBox] = set()
        """Boxes that run, started here."""
        self._place = (kubeconfig, context, namespace)
        self._options: dict[str, Any] = {
            "max_seconds": max_seconds,
            "runtime_class": runtime_class,
            "node_selector": node_selector,
            "pull_secrets": tuple(pull_secrets or ()),
        }
        self._start_seconds = start_seconds
        self._cluster: Cluster | None = None
        self._connecting = asyncio.Lock()
        self._policies: set[str] = set()
        self._reaping: asyncio.Task[None] | None = None

    async def find_obstacle(self) -> str:
        try:
            cluster = await self.cluster()
            await cluster.call(
                cluster.core.list_namespaced_pod(cluster.namespace, label_selector=BOX_LABEL, limit=1),
                f"list pods in {cluster.namespace}",
            )
            await self._ensure_policy(cluster, "closed")
        except BoxError as error:
            return str(error)
        return ""

    async def cluster(self) -> Cluster:
        async with self._connecting:
            if self._cluster is None:
                self._cluster = await Cluster.connect(*self._place)
        return self._cluster

    async def start(self, spec: BoxSpec, label: BoxLabel, *, gateway: str = "") -> "KubernetesBox":
        _check(spec, gateway)
        cluster = await self.cluster()
        await self._ensure_policy(cluster, "public" if spec.network is Network.PUBLIC else "closed")
        if self._reaping is None:
            self._reaping = asyncio.create_task(self._reap())
        label = label if label.worker else msgspec.structs.replace(label, worker=own_process())
        record = self._record(spec, label, cluster)
        line, _ = await self.holders.hold(HoldRequest(record, str(boxes_folder(self.state) / record.id)))
        box = KubernetesBox(self, cluster, line, spec, gateway)
        try:
            body = pod_manifest(spec, label, record.id, **self._options)
            await cluster.call(cluster.core.create_namespaced_pod(cluster.namespace, body), "create pod")
            await self._wait_until_running(cluster, record.id)
            await box.open_lifeline()
            await box.open_network()
        except BaseException:
            line.drop()  # its holder deletes the pod
            box.forget()
            raise
        self.boxes.add(box)
        return box

    async def aclose(self) -> None:
        if self._reaping is not None:
            self._reaping.cancel()
            await asyncio.gather(self._reaping, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in list(self.boxes)), return_exceptions=True)
        await self.holders.close()
        if self._cluster is not None:
            await self._cluster.close()

    def _record(self, spec: BoxSpec, label: BoxLabel, cluster: Cluster) -> BoxRecord:
        box_id = new_box_id(self.state, is_remote=True)
        kubeconfig, context, _ = self._place
        return BoxRecord(
            id=box_id,
            backend=self.name,
            label=label,
            image=spec.image,
            boot_id=boot_id(),
            holder=0,
            holder_start=0,
            created=time.time(),
            remove=(sys.executable, "-m", __name__, box_id, cluster.namespace, kubeconfig, context),
            remove_environment={
                key: value for key, value in os.environ.items() if key.startswith(_KEPT_VARIABLES)
            },
        )

    async def _ensure_policy(self, cluster: Cluster, network: str) -> None:
        if network in self._policies:
            return
        with suppress(PodConflict):
            await cluster.call(
                cluster.networking.create_namespaced_network_policy(
                    cluster.namespace, network_policy(network)
                ),
                "create network policy",
            )
        self._policies.add(network)

    async def _wait_until_running(self, cluster: Cluster, name: str) -> None:
        why = "it was not scheduled"
        try:
            async with asyncio.timeout(self._start_seconds):
                while True:
                    pod = await cluster.call(
                        cluster.core.read_namespaced_pod(name, cluster.namespace), "read pod"
                    )
                    state, why = state_of(pod)
                    if state == "running":
                        return
                    if state == "hopeless":
                        raise BoxError(f"a box did not start: kubernetes: {why}")
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise BoxError(
                f"a box did not start within {self._start_seconds:g} s: kubernetes: {why}"
            ) from None

    async def _reap(self) -> None:
        """Deletes pods of this package that have ended, or never ran, of all processes."""
        while True:
            with suppress(BoxError):
                cluster = await self.cluster()
                listed = await cluster.call(
                    cluster.core.list_namespaced_pod(cluster.namespace, label_selector=BOX_LABEL), "list pods"
                )
                for pod in listed.items:
                    age = time.time() - pod.metadata.creation_timestamp.timestamp()
                    is_over = pod.status.phase in ("Succeeded", "Failed")
                    if is_over or (pod.status.phase == "Pending" and age > _PENDING_SECONDS):
                        await cluster.delete_pod(pod.metadata.name)
            await asyncio.sleep(_REAP_SECONDS)


class KubernetesBox(ShellBox):
    """One pod as a box."""

    backend_name = "kubernetes"

    def __init__(
        self, backend: KubernetesBackend, cluster: Cluster, line: HolderLine, spec: BoxSpec, gateway: str
    ) -> None:
        super().__init__(spec, gateway)
        self._backend = backend
        self._cluster = cluster
        self._line = line
        self._lifeline: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._line.record.id

    @property
    def has_ended(self) -> bool:
        return self._line.has_ended

    async def open_lifeline(self) -> None:
        """Renews the lease of the pod from now on, until this process ends."""
        stream = await self._open_shell(LIFELINE, "")
        await stream.send(b"\n")
        self._lifeline = asyncio.create_task(self._renew(stream))

    def forget(self) -> None:
        """Ends what this process does for a pod that did not start."""
        if self._lifeline is not None:
            self._lifeline.cancel()

    async def _renew(self, stream: ShellStream) -> None:
        """Opens the stream again when it breaks, as it does when a proxy on the way restarts."""
        pause = self._line.record.label.lease_seconds / _RENEWALS_PER_LEASE
        while True:
            ended = asyncio.create_task(stream.receive())
            try:
                await asyncio.wait({ended}, timeout=pause)
                with suppress(BoxError):
                    if ended.done():
                        stream = await self._open_shell(LIFELINE, "")
                    await stream.send(b"\n")
            finally:
                ended.cancel()

    async def _start_shell(self, program: str, user: str) -> ShellStream:
        if ":" in user:
            raise BoxError(f"user: the backend kubernetes takes a name or a number, got {user!r}")
        command = ["sh", "-c", program] if not user else ["sh", "-c", _AS_USER, user, program]
        return await self._cluster.start_program(self.id, command)

    async def _end(self) -> None:
        if self._lifeline is not None:
            self._lifeline.cancel()
            await asyncio.gather(self._lifeline, return_exceptions=True)
        if not self.has_ended:
            with suppress(BoxError):  # then its holder deletes it
                await self._cluster.delete_pod(self.id)
                await asyncio.to_thread(_forget_pod, self._line)
        await self._backend.holders.end(self._line)
        self._backend.boxes.discard(self)


def _forget_pod(line: HolderLine) -> None:
    """Spares the holder another look at a pod that is deleted."""
    if (record := read_record(line.folder)) is not None:
        rewrite_record(line.folder, msgspec.structs.replace(record, remove=()))


def _check(spec: BoxSpec, gateway: str) -> None:
    if spec.image == HOST_IMAGE or spec.folder or spec.layers:
        raise BoxError(
            "box: the backend kubernetes needs an image of a registry; bubblewrap starts from the host or a folder"
        )
    for name in ("mounts", "network_of"):
        if getattr(spec, name):
            raise BoxError(f"box: {name}: the backend kubernetes does not have it; bubblewrap does")
    if spec.network is Network.GATEWAY and not gateway:
        raise BoxError("network gateway: this attempt has none; accepted: none, allowlist, public")


async def _delete(name: str, namespace: str, kubeconfig: str, context: str) -> None:
    cluster = await Cluster.connect(kubeconfig, context, namespace)
    try:
        await cluster.delete_pod(name)
    finally:
        await cluster.close()


if __name__ == "__main__":
    asyncio.run(_delete(*sys.argv[1:]))
