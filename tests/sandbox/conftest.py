"""Sandboxes for the tests of this folder. Backends that do not run on this machine are skipped with their reason."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.box import BoxBackend
from rollwright.sandbox.bubblewrap import BubblewrapBackend
from rollwright.sandbox.client import Sandbox, SandboxFactory
from rollwright.sandbox.protocol import SandboxLimits

LIMITS = SandboxLimits(seconds=20, cpu_seconds=60, memory=256 << 20, disk=4 << 20, threads=8)


@pytest.fixture(scope="module")
def plain_sandboxes() -> Iterator[SandboxFactory]:
    made = SandboxFactory(LIMITS)
    yield made
    made.close()


@pytest.fixture
async def plain_sandbox(plain_sandboxes: SandboxFactory) -> AsyncIterator[Sandbox]:
    made = await plain_sandboxes.open()
    yield made
    made.close()


@cache
def obstacle(name: str) -> str:
    """Why a backend does not run here; empty: it does."""

    async def check() -> str:
        with TemporaryDirectory() as folder:
            backend = make_backend(name, state=folder)
            try:
                return await check_backend(backend)
            finally:
                await backend.aclose()

    return asyncio.run(check())


async def _started(name: str, folder: Path) -> AsyncIterator[BoxBackend]:
    why = await asyncio.to_thread(obstacle, name)
    if why:
        pytest.skip(f"{name} does not run here: {why}")
    backend = make_backend(name, state=str(folder / "state"))
    yield backend
    await backend.aclose()


@pytest.fixture
async def bubblewrap(tmp_path: Path) -> AsyncIterator[BubblewrapBackend]:
    async for backend in _started("bubblewrap", tmp_path):
        assert isinstance(backend, BubblewrapBackend)
        yield backend


PROGRAMS = (
    "bash",
    "sh",
    "cat",
    "ls",
    "chmod",
    "mkdir",
    "rm",
    "echo",
    "env",
    "sleep",
    "tar",
    "test",
    "timeout",
)


@pytest.fixture
def root_files(tmp_path: Path) -> Path:
    """A small root file system from programs of this machine and the libraries they need."""
    root = tmp_path / "root"
    for name in ("bin", "etc", "tmp", "proc", "dev", "root"):
        (root / name).mkdir(parents=True)
    files = {Path(found).resolve(): root / "bin" / name for name in PROGRAMS if (found := shutil.which(name))}
    for source, target in files.items():
        shutil.copy(source, target)
        listed = subprocess.run(["ldd", str(source)], capture_output=True, text=True).stdout
        for word in listed.split():
            if word.startswith("/"):
                (root / word.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, root / word.lstrip("/"))
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root
