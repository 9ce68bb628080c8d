"""Sandboxes for the tests of this folder."""

from collections.abc import AsyncIterator, Iterator

import pytest

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
