"""The objects of Kubernetes that boxes are made of: pods and network policies, as plain data."""

from collections.abc import Mapping
from typing import Any

from rollwright.sandbox.box import BoxLabel, BoxSpec, Network

BOX_LABEL, NETWORK_LABEL = "rollwright.dev/box", "rollwright.dev/network"
CONTAINER = "box"
LEASE_FOLDER = "/run/rollwright"
OWNER_ANNOTATIONS = ("rollout-id", "attempt-id", "worker")
POLICIES = {"closed": "rollwright-closed", "public": "rollwright-public"}
"""Names of the network policies, by the value of `NETWORK_LABEL` that they select."""

_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10")
"""Addresses that a public box may not reach: the cluster's own, and the cloud's metadata service."""

_CAPABILITIES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "SETFCAP",
]
_HOPELESS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
    }
)

FIRST_PROGRAM = (
    "n=0; while [ $n -lt {lease} ]; do "
    "if [ -e {folder}/renewed ]; then rm -f {folder}/renewed; n=0; fi; sleep 1; n=$((n+1)); done"
)
"""First process of a pod: ends when the lease was not renewed for so many seconds."""

LIFELINE = f"while IFS= read -r _; do : > {LEASE_FOLDER}/renewed; done"
"""Renews the lease with each line of its input."""


def pod_manifest(
    spec: BoxSpec,
    label: BoxLabel,
    name: str,
    *,
    max_seconds: int,
    runtime_class: str = "",
    node_selector: Mapping[str, str] | None = None,
    pull_secrets: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The pod of a box."""
    limits = {"memory": f"{spec.memory_mb}Mi"}
    limits |= {"cpu": f"{spec.cpus:g}"} if spec.cpus else {}
    limits |= {"ephemeral-storage": f"{spec.disk_mb}Mi"} if spec.disk_mb else {}
    wanted = {"memory": f"{max(16, spec.memory_mb // 8)}Mi", "cpu": "50m"}
    network = "public" if spec.network is Network.PUBLIC else "closed"
    owner = dict(zip(OWNER_ANNOTATIONS, (label.rollout_id, label.attempt_id, label.worker), strict=True))
    container = {
        "name": CONTAINER,
        "image": spec.image,
        "command": [
            "/bin/sh",
            "-c",
            FIRST_PROGRAM.format(lease=max(1, round(label.lease_seconds)), folder=LEASE_FOLDER),
        ],
        "resources": {"limits": limits, "requests": wanted},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"], "add": _CAPABILITIES},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "lease", "mountPath": LEASE_FOLDER}],
    }
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": [{"name": "lease", "emptyDir": {"sizeLimit": "1Mi"}}],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": max_seconds,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": spec.hostname,
        "nodeSelector": dict(node_selector or {}),
        "imagePullSecrets": [{"name": each} for each in pull_secrets],
    }
    if runtime_class:
        pod["runtimeClassName"] = runtime_class
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {BOX_LABEL: name, NETWORK_LABEL: network},
            "annotations": {f"rollwright.dev/{key}": value for key, value in owner.items()},
        },
        "spec": pod,
    }


def network_policy(network: str) -> dict[str, Any]:
    """The policy of all pods whose `NETWORK_LABEL` is `closed` or `public`; nothing may come in in either."""
    out: list[dict[str, Any]] = []
    if network == "public":
        out = [
            {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_PRIVATE)}}]},
            {"ports": [{"protocol": each, "port": 53} for each in ("UDP", "TCP")]},
        ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICIES[network]},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK_LABEL: network}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": out,
        },
    }


def state_of(pod: Any) -> tuple[str, str]:
    """`running`, `waiting` or `hopeless`, and why."""
    if pod.status.phase in ("Succeeded", "Failed"):
        return (
            "hopeless",
            pod.status.message or pod.status.reason or f"the pod has {pod.status.phase.lower()}",
        )
    for each in pod.status.container_statuses or ():
        if each.state.running is not None:
            return "running", ""
        if each.state.waiting is not None:
            why = f"{each.state.waiting.reason}: {each.state.waiting.message or ''}".strip(": ")
            return ("hopeless" if each.state.waiting.reason in _HOPELESS else "waiting"), why
    waiting = [
        each.message for each in pod.status.conditions or () if each.status == "False" and each.message
    ]
    return "waiting", waiting[0] if waiting else "it was not scheduled"
