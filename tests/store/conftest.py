"""Every backend behind one fixture: the tests of the contract run over each of them unchanged."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from rollwright.store.contract import Store
from rollwright.store.memory import MemoryStore
from rollwright.store.sql import SqlStore
from rollwright.store.sql.sqlite import SqliteDriver


class ManualClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    async def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Backend:
    store: Store
    advance: Callable[[float], Awaitable[None]]
    """Moves the store's clock; nothing else moves it."""


async def memory(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    yield Backend(store, clock.advance)
    await store.close()


async def sqlite(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    clock = ManualClock()
    path = request.getfixturevalue("tmp_path") / "store.db"
    store = SqlStore(await SqliteDriver.open(path, clock))
    yield Backend(store, clock.advance)
    await store.close()


async def memory_in_real_time(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    store = MemoryStore()
    yield store
    await store.close()


async def sqlite_in_real_time(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    store = SqlStore(await SqliteDriver.open(request.getfixturevalue("tmp_path") / "store.db"))
    yield store
    await store.close()


BACKENDS = {"memory": memory, "sqlite": sqlite}
REAL_TIME = {"memory": memory_in_real_time, "sqlite": sqlite_in_real_time}


@pytest.fixture(params=BACKENDS)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """A store whose clock the test moves by hand."""
    async for each in BACKENDS[request.param](request):
        yield each


@pytest.fixture
async def store(backend: Backend) -> Store:
    return backend.store


@pytest.fixture
def advance(backend: Backend) -> Callable[[float], Awaitable[None]]:
    return backend.advance


@pytest.fixture(params=REAL_TIME)
async def ticking(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """A store with its own clock, as users have it."""
    async for each in REAL_TIME[request.param](request):
        yield each
