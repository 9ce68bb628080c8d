"""A small network of its own for a test: namespaces for nodes, on two switches that are joined by one cable.

Everything is made by `ip` of iproute2 inside namespaces that the test makes and takes away again; addresses exist in
there alone, and nothing of the machine's own network is touched.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ADDRESS = "10.77.0"
PREFIX = 24
TRUNK = ("trunk0", "trunk1")
"""The two ends of the cable between the switches."""


def why_not() -> str | None:
    """Why namespaces cannot be made here; `None`: they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` here; `apt install iproute2` brings it"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"rw{os.getpid()}p"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
        _ip("-n", probe, "link", "add", "probe", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"this machine does not allow network namespaces: {error.stderr.strip()}"
    finally:
        _gone(probe)
    return None


class Network:
    """Nodes by name: those of the first half are on one switch, the others on another."""

    def __init__(self, halves: tuple[Sequence[str], Sequence[str]]) -> None:
        self._names = [*halves[0], *halves[1]]
        self._switch = f"rw{os.getpid()}s"
        try:
            self._build(halves)
        except BaseException:
            self.close()
            raise

    def namespace(self, name: str) -> str:
        return f"rw{os.getpid()}{name}"

    def address(self, name: str) -> str:
        return f"{ADDRESS}.{self._names.index(name) + 1}"

    def cut(self, name: str) -> None:
        """Takes a node's cable out."""
        _ip("-n", self._switch, "link", "set", name, "down")

    def heal(self, name: str) -> None:
        _ip("-n", self._switch, "link", "set", name, "up")

    def part(self) -> None:
        """Takes out the cable between the halves."""
        _ip("-n", self._switch, "link", "set", TRUNK[0], "down")

    def join(self) -> None:
        _ip("-n", self._switch, "link", "set", TRUNK[0], "up")

    def close(self) -> None:
        """Interfaces go with their namespaces."""
        for name in (*map(self.namespace, self._names), self._switch):
            _gone(name)

    def _build(self, halves: tuple[Sequence[str], Sequence[str]]) -> None:
        _ip("netns", "add", self._switch)
        here = ("-n", self._switch, "link")
        _ip(*here, "add", TRUNK[0], "type", "veth", "peer", "name", TRUNK[1])
        for half, (trunk, names) in enumerate(zip(TRUNK, halves, strict=True)):
            bridge = f"half{half}"
            _ip(*here, "add", bridge, "type", "bridge")
            _ip(*here, "set", bridge, "up")
            _ip(*here, "set", trunk, "master", bridge, "up")
            for name in names:
                node = self.namespace(name)
                _ip("netns", "add", node)
                _ip(*here, "add", name, "type", "veth", "peer", "name", "eth0", "netns", node)
                _ip(*here, "set", name, "master", bridge, "up")
                _ip("-n", node, "address", "add", f"{self.address(name)}/{PREFIX}", "dev", "eth0")
                _ip("-n", node, "link", "set", "eth0", "up")
                _ip("-n", node, "link", "set", "lo", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


def _gone(namespace: str) -> None:
    if Path("/run/netns", namespace).exists():
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", namespace)
