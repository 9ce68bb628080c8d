"""Opens a store by its address.

- `memory`: in this process, gone with it
- a path, or `sqlite:///path`: a SQLite file
- `postgresql://…`: PostgreSQL (needs the extra `postgres`)
- `http://…`, `https://…`, `http+unix:///path/of/socket`: a store behind a server
"""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, cast

from rollwright.addresses import check_address, redacted
from rollwright.errors import ConfigError
from rollwright.registry import Registry
from rollwright.store.api import Store
from rollwright.store.memory import MemoryStore
from rollwright.store.objects.buckets import open_bucket
from rollwright.store.objects.store import ObjectBackedStore

ADDRESS_VARIABLE = "ROLLWRIGHT_STORE"
"""Environment variable that holds an address. Unlike an argument, other users of the machine cannot read it."""

TOKEN_VARIABLE = "ROLLWRIGHT_STORE_TOKEN"
"""Environment variable that holds the token of a store behind a server."""


TRAJECTORIES_VARIABLE = "ROLLWRIGHT_TRAJECTORIES"
"""Environment variable that says where trajectories are kept as objects beside their rows: `file:///path` or
`s3://bucket/prefix`. Every process that opens the store needs the same one; worker processes inherit it."""

USUAL_PATIENCE = 60.0
"""Seconds of retries for a store that cannot be reached: a server that restarts is back by then."""


OnOutage = Callable[[str], None] | None
"""Gets a message for people that a store cannot be reached."""


class StoreOpener(Protocol):
    """Opens the store of an address. `must_exist`: reject an address whose store would have to be created. `patience`:
    seconds of retries for a store that cannot be reached; `on_outage` gets a message every few seconds."""

    def __call__(
        self, address: str, *, must_exist: bool, patience: float, on_outage: OnOutage
    ) -> Awaitable[Store]: ...


STORES: Registry[StoreOpener] = Registry(
    "stores",
    "store",
    {
        "memory": "rollwright.store.opening:open_memory",
        "sqlite": "rollwright.store.opening:open_sqlite",
        "postgresql": "rollwright.store.opening:open_postgresql",
        "postgres": "rollwright.store.opening:open_postgresql",
        "http": "rollwright.store.opening:open_http",
        "https": "rollwright.store.opening:open_http",
        "http+unix": "rollwright.store.opening:open_http",
    },
    protocol="rollwright.store.opening:StoreOpener",
    key="--store SCHEME://…",
)
"""Openers by the scheme of an address."""


def sqlite_path(address: str) -> Path | None:
    """The path of a SQLite store; `None` for any other address."""
    scheme, found, rest = address.partition("://")
    if address == "memory" or (found and scheme.lower() != "sqlite"):
        return None
    return Path(rest.removeprefix("/")) if found else Path(address)


async def open_store(
    address: str,
    *,
    must_exist: bool = False,
    patience: float = USUAL_PATIENCE,
    on_outage: OnOutage = None,
    trajectories: str | None = None,
) -> Store:
    """Opens the store; a missing file is created, unless it must exist.

    `trajectories`: where trajectories are kept as objects, as `file:///path` or `s3://bucket/prefix`. Unset: what
    `ROLLWRIGHT_TRAJECTORIES` says; without it, in the store's own rows.

    A server that cannot be reached, now or later, is retried for `patience` seconds; `on_outage` gets a line for people
    every few seconds.
    """
    try:
        check_address(address)
    except ConfigError as error:
        raise ConfigError(f"store: {error}") from None
    scheme = scheme_of(address)
    if not STORES.knows(scheme) or ":" in scheme:
        raise ConfigError(
            f"store {redacted(address)!r}: unknown scheme {scheme!r}; known: memory, a path, sqlite:///path, "
            f"postgresql://…, http://…{''.join(f', {name}://…' for name in STORES.offered())}"
        )
    place = trajectories or os.environ.get(TRAJECTORIES_VARIABLE)
    objects = (
        open_bucket(place) if place else None
    )  # before the store, so that a wrong address creates nothing
    opened = STORES.make(scheme, address, must_exist=must_exist, patience=patience, on_outage=on_outage)
    with STORES.blame(scheme):
        store = cast(Store, await opened)
    return store if objects is None else ObjectBackedStore(store, objects)


def scheme_of(address: str) -> str:
    """The name in `STORES` that opens this address."""
    if sqlite_path(address) is not None:
        return "sqlite"
    return address.partition("://")[0].lower()


async def open_memory(address: str, *, must_exist: bool, patience: float, on_outage: OnOutage) -> Store:
    return MemoryStore()


async def open_http(address: str, *, must_exist: bool, patience: float, on_outage: OnOutage) -> Store:
    from rollwright.store.http.client import HttpStore
    from rollwright.store.http.retry import RetryRule

    token, retry = os.environ.get(TOKEN_VARIABLE), RetryRule(give_up_after=patience)
    return HttpStore(address, token=token, retry=retry, on_outage=on_outage)


async def open_sqlite(address: str, *, must_exist: bool, patience: float, on_outage: OnOutage) -> Store:
    from rollwright.store.sql import SqlStore
    from rollwright.store.sql.sqlite import SqliteDriver

    path = sqlite_path(address)
    assert path is not None, "see `scheme_of`"
    _check_path(path, must_exist)
    return SqlStore(await SqliteDriver.open(path))


def _check_path(path: Path, must_exist: bool) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"{str(path)!r}: the folder {str(path.parent)!r} does not exist")
    if must_exist and not path.is_file():
        raise ConfigError(f"{str(path)!r}: there is no such file")


async def open_postgresql(address: str, *, must_exist: bool, patience: float, on_outage: OnOutage) -> Store:
    from rollwright.store.sql import SqlStore

    try:
        from rollwright.store.sql.postgres import PostgresDriver
    except ImportError as error:
        raise ConfigError("store: PostgreSQL needs asyncpg: install rollwright[postgres]") from error
    return SqlStore(await PostgresDriver.open(address, patience=patience, on_outage=on_outage))
