"""A connection to a Kubernetes cluster through the PyPI client `kubernetes-asyncio`, whose failures are one line each."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollwright.sandbox.box import BoxError
from rollwright.sandbox.kubernetes_objects import CONTAINER
from rollwright.sandbox.shell_box import ShellStream

MISSING = 'the package kubernetes-asyncio is missing; pip install "rollwright[kubernetes]"'

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File that a pod with a service account has."""


class Cluster:
    """A connection to a cluster. Belongs to one event loop."""

    def __init__(self, configuration: Any, namespace: str) -> None:
        from kubernetes_asyncio import client
        from kubernetes_asyncio.stream import WsApiClient

        self.namespace = namespace
        self._client = client.ApiClient(configuration)
        self._streams = WsApiClient(configuration, heartbeat=20)
        # The client's annotations name its models alone, and it takes plain data as well.
        self.core: Any = client.CoreV1Api(self._client)
        self.networking: Any = client.NetworkingV1Api(self._client)
        self._exec: Any = client.CoreV1Api(self._streams)

    @classmethod
    async def connect(cls, kubeconfig: str, context: str, namespace: str) -> "Cluster":
        config: Any
        try:
            from kubernetes_asyncio import client, config
        except ModuleNotFoundError as error:
            raise BoxError(MISSING) from error
        configuration = client.Configuration()
        try:
            if not kubeconfig and not context and (own := _own_namespace()):
                config.load_incluster_config(client_configuration=configuration)
                return cls(configuration, namespace or own)
            file = kubeconfig or None
            # It warns of a file that is missing; the error below says the same.
            logging.getLogger("kubernetes_asyncio.config").setLevel(logging.ERROR)
            await config.load_kube_config(
                config_file=file, context=context or None, client_configuration=configuration
            )
            contexts, active = config.list_kube_config_contexts(config_file=file)
            chosen = next((each for each in contexts if each["name"] == context), active)
        except (config.ConfigException, OSError) as error:
            raise BoxError(
                f"no cluster: {' '.join(str(error).split())}; set KUBECONFIG, or the backend's option kubeconfig"
            ) from error
        return cls(configuration, namespace or chosen["context"].get("namespace") or "default")

    async def start_program(self, pod: str, command: list[str]) -> ShellStream:
        import aiohttp

        try:
            connecting = await self._exec.connect_get_namespaced_pod_exec(
                pod,
                self.namespace,
                command=command,
                container=CONTAINER,
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
            )
            return _ExecStream(await connecting)
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 404:
                raise BoxError("the box has ended") from error
            raise BoxError(f"kubernetes: exec in {pod}: {error.status} {error.message}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BoxError(f"kubernetes: exec in {pod}: {error}") from error

    async def delete_pod(self, name: str) -> None:
        """Deletes a pod without a grace period; one that does not exist is no error."""
        try:
            await self.call(
                self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0), "delete pod"
            )
        except PodNotFound:
            return

    async def call(self, request: Any, what: str) -> Any:
        """Awaits a request; its failure is one line."""
        import aiohttp
        from kubernetes_asyncio.client import ApiException

        try:
            return await request
        except ApiException as error:
            kind = PodNotFound if error.status == 404 else PodConflict if error.status == 409 else BoxError
            raise kind(f"kubernetes: {what}: {_reason(error)}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BoxError(f"kubernetes: {what}: {error or type(error).__name__}") from error

    async def close(self) -> None:
        await self._client.close()
        await self._streams.close()


class PodNotFound(BoxError):
    """The API server knows no such object."""


class PodConflict(BoxError):
    """The API server has an object of this name already."""


class _ExecStream:
    """Channels of an `exec` over a websocket, protocol `v4.channel.k8s.io`."""

    def __init__(self, line: Any) -> None:
        self._line = line

    async def send(self, data: bytes) -> None:
        try:
            await self._line.send_bytes(b"\0" + data)
        except (OSError, RuntimeError) as error:  # aiohttp's own error of a closed line is an OSError
            raise BoxError("the box has ended") from error

    async def receive(self) -> tuple[int, bytes] | None:
        import aiohttp

        message = await self._line.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            return message.data[0], message.data[1:]
        if message.type is aiohttp.WSMsgType.TEXT:
            return ord(message.data[0]), message.data[1:].encode()
        return None

    async def close(self) -> None:
        with suppress(OSError, RuntimeError):
            await self._line.close()


def _own_namespace() -> str:
    """The namespace of the pod that this process runs in; empty: it runs in none."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return ""
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return ""


def _reason(error: Any) -> str:
    """The message of a `Status` that the API server answered with."""
    with suppress(msgspec.MsgspecError, TypeError, AttributeError):
        told = msgspec.json.decode(error.body)["message"]
        return " ".join(str(told).split())
    return f"{error.status} {error.reason}"
