"""A small Kubernetes API server whose pods are bubblewrap boxes, for machines without a cluster.

It speaks the part of the real protocol that pods need: JSON objects with `Status` errors, label selectors, bearer tokens,
`exec` over a websocket with channels (`v4.channel.k8s.io`), pod phases, `activeDeadlineSeconds`, memory limits, network
policies. As with a real runtime, an `exec` stays open while any process holds its streams, closing it does not end the
program, its input cannot be closed, and a pod lives as long as its first process.

A pod that a policy with no egress selects has no network. What it does not have: nodes, scheduling, other objects.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from aiohttp import WSMsgType, web

from rollwright.sandbox.box import BoxCommand, BoxError, BoxLabel, BoxSpec
from rollwright.sandbox.bubblewrap import BubblewrapBackend, BubblewrapBox
from rollwright.simulation.box_process import BoxProcess

PROTOCOL = "v4.channel.k8s.io"
_STDIN, _ERROR = 0, 3


class SimulatedPod:
    """One pod: its object, and the box that runs it."""

    def __init__(self, body: dict[str, Any], namespace: str) -> None:
        self.body = body
        self.box: BubblewrapBox | None = None
        self.running: asyncio.Task[None] | None = None
        meta = body["metadata"]
        meta.update(
            {
                "namespace": namespace,
                "uid": secrets.token_hex(8),
                "creationTimestamp": _now(),
                "resourceVersion": "1",
            }
        )
        self.set_phase("Pending", {"waiting": {"reason": "ContainerCreating"}})

    @property
    def container(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["spec"]["containers"][0]
        return found

    @property
    def labels(self) -> Mapping[str, str]:
        return self.body["metadata"].get("labels") or {}

    def set_phase(self, phase: str, state: dict[str, Any], **more: str) -> None:
        self.body["status"] = {
            "phase": phase,
            **more,
            "containerStatuses": [
                {
                    "name": self.container["name"],
                    "image": self.container["image"],
                    "imageID": self.container["image"],
                    "ready": "running" in state,
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }


class SimulatedCluster:
    """The API server. Belongs to one event loop."""

    def __init__(self, images: Mapping[str, BoxSpec], *, state: Path, namespace: str = "default") -> None:
        """`images`: what a pod of each image is made of; others cannot be pulled."""
        self._images = images
        self._backend = BubblewrapBackend(state=str(state))
        self._namespace = namespace
        self.token = secrets.token_hex(16)
        self.url = ""
        self.pods: dict[str, SimulatedPod] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.forbidden: set[str] = set()
        """Kinds of objects that the token may not create."""
        self._runner: web.AppRunner | None = None
        self._lines: set[web.WebSocketResponse] = set()

    async def start(self) -> None:
        app = web.Application(middlewares=[self._authenticate])
        pods = "/api/v1/namespaces/{namespace}/pods"
        policies = "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        app.add_routes(
            [
                web.post(pods, self._create_pod),
                web.get(pods, self._list_pods),
                web.get(pods + "/{name}", self._read_pod),
                web.delete(pods + "/{name}", self._delete_pod),
                web.get(pods + "/{name}/exec", self._exec),
                web.post(policies, self._create_policy),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        for name in list(self.pods):
            await self._remove(name)
        for line in list(self._lines):
            await line.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._backend.aclose()

    def write_kubeconfig(self, file: Path, token: str = "") -> Path:
        """A file by which clients find this server."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "simulated", "cluster": {"server": self.url}}],
            "users": [{"name": "worker", "user": {"token": token or self.token}}],
            "contexts": [
                {
                    "name": "simulated",
                    "context": {"cluster": "simulated", "user": "worker", "namespace": self._namespace},
                }
            ],
            "current-context": "simulated",
        }
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return file

    def is_closed(self, pod: SimulatedPod) -> bool:
        """Whether a policy selects the pod and no policy that selects it lets anything out."""
        selecting = [
            each["spec"]
            for each in self.policies.values()
            if "Egress" in each["spec"].get("policyTypes", [])
            and (each["spec"]["podSelector"].get("matchLabels") or {}).items() <= pod.labels.items()
        ]
        return bool(selecting) and not any(each.get("egress") for each in selecting)

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if request.match_info.get("namespace") != self._namespace:
            return _status(
                403, "Forbidden", f"namespace {request.match_info.get('namespace')!r} is forbidden"
            )
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _create_pod(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if "pods" in self.forbidden:
            return _status(403, "Forbidden", 'pods is forbidden: User "worker" cannot create resource "pods"')
        if name in self.pods:
            return _status(409, "AlreadyExists", f'pods "{name}" already exists')
        if not body["spec"].get("containers"):
            return _status(422, "Invalid", "spec.containers: Required value")
        pod = self.pods[name] = SimulatedPod(body, self._namespace)
        pod.running = asyncio.create_task(self._run_pod(pod))
        return web.json_response(pod.body, status=201)

    async def _run_pod(self, pod: SimulatedPod) -> None:
        """A pod's life: image, volumes, first process, end."""
        image = self._images.get(pod.container["image"])
        if image is None:
            why = f'failed to pull image "{pod.container["image"]}": not found'
            pod.set_phase("Pending", {"waiting": {"reason": "ErrImagePull", "message": why}})
            return
        limits = pod.container.get("resources", {}).get("limits", {})
        spec = image.replace(
            memory_mb=int(str(limits.get("memory", "2048Mi")).removesuffix("Mi")),
            cpus=float(limits.get("cpu", 0)),
            hostname=pod.body["spec"].get("hostname") or pod.body["metadata"]["name"],
        )
        try:
            pod.box = await self._backend.start(spec, BoxLabel(worker="cluster", lease_seconds=60.0))
            for volume in pod.container.get("volumeMounts", ()):
                await pod.box.run(f"mkdir -p -m 777 {volume['mountPath']}", user="0")
            first = await BoxProcess.start(
                pod.box, BoxCommand(command=pod.container["command"]), has_input=False
            )
        except BoxError as error:
            pod.set_phase(
                "Failed", {"terminated": {"exitCode": 128, "reason": "StartError"}}, message=str(error)
            )
            return
        pod.set_phase("Running", {"running": {"startedAt": _now()}})
        more: dict[str, str] = {}
        try:
            async with asyncio.timeout(pod.body["spec"].get("activeDeadlineSeconds")):
                code = await first.wait()
        except TimeoutError:
            code, more = 137, {"reason": "DeadlineExceeded"}
        except BoxError:
            code = 137
        await first.close()
        await pod.box.stop()
        phase = "Succeeded" if code == 0 else "Failed"
        pod.set_phase(
            phase, {"terminated": {"exitCode": code, "reason": "Completed" if not code else "Error"}}, **more
        )

    async def _list_pods(self, request: web.Request) -> web.Response:
        wanted = [each.partition("=") for each in request.query.get("labelSelector", "").split(",") if each]
        found = [
            pod.body
            for pod in self.pods.values()
            if all(
                key in pod.labels and (not equal or pod.labels[key] == value) for key, equal, value in wanted
            )
        ]
        found = found[: int(request.query.get("limit") or len(found) or 1)]
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": found})

    async def _read_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return _no_pod(request) if pod is None else web.json_response(pod.body)

    async def _delete_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _no_pod(request)
        await self._remove(request.match_info["name"])
        return web.json_response(pod.body)

    async def _remove(self, name: str) -> None:
        pod = self.pods.pop(name)
        if pod.running is not None:
            pod.running.cancel()
            await asyncio.gather(pod.running, return_exceptions=True)
        if pod.box is not None:
            await pod.box.stop()

    async def _create_policy(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if "networkpolicies" in self.forbidden:
            why = 'networkpolicies is forbidden: User "worker" cannot create resource "networkpolicies"'
            return _status(403, "Forbidden", why)
        if name in self.policies:
            return _status(409, "AlreadyExists", f'networkpolicies "{name}" already exists')
        self.policies[name] = body
        return web.json_response(body, status=201)

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _no_pod(request)
        if pod.box is None or pod.body["status"]["phase"] != "Running":
            return _status(400, "BadRequest", f"container {pod.container['name']} is not running")
        line = web.WebSocketResponse(protocols=[PROTOCOL])
        await line.prepare(request)
        self._lines.add(line)
        environment = {each["name"]: each.get("value", "") for each in pod.container.get("env", ())}
        try:
            process = await BoxProcess.start(
                pod.box, BoxCommand(command=request.query.getall("command"), environment=environment)
            )
            await self._serve(line, process)
        except BoxError as error:
            await _report(line, 126, f"OCI runtime exec failed: {error}")
        finally:
            self._lines.discard(line)
            with suppress(OSError, RuntimeError):
                await line.close()
        return line

    async def _serve(self, line: web.WebSocketResponse, process: BoxProcess) -> None:
        taking = asyncio.create_task(_take_input(line, process))
        try:
            while (piece := await process.read()) is not None:
                if not line.closed:
                    with suppress(OSError, RuntimeError):
                        await line.send_bytes(bytes([piece[0]]) + piece[1])
            code = await process.wait()
            await _report(line, code)
        finally:
            taking.cancel()
            await process.close()


async def _take_input(line: web.WebSocketResponse, process: BoxProcess) -> None:
    """A closed line closes the program's input, and nothing else of it."""
    async for message in line:
        if message.type is WSMsgType.BINARY and message.data[0] == _STDIN:
            await process.write(message.data[1:])
    process.close_input()


async def _report(line: web.WebSocketResponse, code: int, message: str = "") -> None:
    told: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if code:
        told = {
            "metadata": {},
            "status": "Failure",
            "message": message or f"command terminated with non-zero exit code: {code}",
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
        }
    with suppress(OSError, RuntimeError):
        await line.send_bytes(bytes([_ERROR]) + json.dumps(told).encode())


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return web.json_response(body, status=code)


def _no_pod(request: web.Request) -> web.Response:
    return _status(404, "NotFound", f'pods "{request.match_info["name"]}" not found')


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
