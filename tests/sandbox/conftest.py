"""Sandboxes for the tests of this folder."""

from collections.abc import AsyncIterator, Iterator

import pytest

from rollwright.sandbox.client import Nursery, Sandbox
from rollwright.sandbox.protocol import SandboxLimits

LIMITS = SandboxLimits(seconds=20, cpu_seconds=60, memory=256 << 20, disk=4 << 20, threads=8)


@pytest.fixture(scope="module")
def plain_nursery() -> Iterator[Nursery]:
    made = Nursery(LIMITS)
    yield made
    made.close()


@pytest.fixture
async def plain_sandbox(plain_nursery: Nursery) -> AsyncIterator[Sandbox]:
    made = await plain_nursery.open()
    yield made
    made.close()
