"""Operations on resources and their versions."""

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import bindparam, select

from rollwright.store.checks import pack_mapping, unpack
from rollwright.store.errors import NotFound, StoreError
from rollwright.store.records import Page, ResourcesUpdate
from rollwright.store.sql.schema import resources
from rollwright.store.sql.statements import Operation, Row, Statement, any_of, insert_into
from rollwright.store.sql.transaction import Transaction


def add_resources(
    tx: Transaction, resources_id: str, values: Mapping[str, Any]
) -> Operation[ResourcesUpdate]:
    data = pack_mapping(values, "resources")
    yield INSERT(resources_id=resources_id, version=1, create_time=tx.now, update_time=tx.now, data=data)
    [first] = yield VERSION(resources_id=resources_id, version=1)
    if first[-1] != data:
        raise StoreError(f"resources {resources_id} exist already, with other values; update them instead")
    return _record(first)


def update_resources(
    tx: Transaction, resources_id: str, values: Mapping[str, Any]
) -> Operation[ResourcesUpdate]:
    data = pack_mapping(values, "resources")
    while True:
        rows = yield NEWEST(resources_id=resources_id)
        if not rows:
            raise NotFound(f"no resources {resources_id!r}")
        _, version, create_time, _, newest = rows[0]
        if newest == data:
            return _record(rows[0])
        # A concurrent update may insert this version first; then this insert does nothing, and the loop reads it.
        yield INSERT(
            resources_id=resources_id,
            version=version + 1,
            create_time=create_time,
            update_time=tx.now,
            data=data,
        )


def require_resources(names: Iterable[str | None]) -> Operation[None]:
    """Rejects an id under which there are no resources."""
    wanted = {name for name in names if name is not None}
    if wanted:
        found = {row[0] for row in (yield KNOWN_RESOURCES(ids=sorted(wanted)))}
        for name in sorted(wanted - found):
            raise NotFound(f"no resources {name!r}")


def get_resources(resources_id: str, version: int | None) -> Operation[ResourcesUpdate | None]:
    if version is None:
        rows = yield NEWEST(resources_id=resources_id)
    else:
        rows = yield VERSION(resources_id=resources_id, version=version)
    return _record(rows[0]) if rows else None


def latest_resources() -> Operation[ResourcesUpdate | None]:
    rows = yield LATEST_CHANGE()
    return _record(rows[0]) if rows else None


def query_resources(contains: str | None, limit: int, offset: int) -> Operation[Page[ResourcesUpdate]]:
    names = [row[0] for row in (yield NAMES()) if (contains or "") in row[0]]
    found = []
    for name in names[offset : None if limit < 0 else offset + limit]:
        [row] = yield NEWEST(resources_id=name)
        found.append(_record(row))
    return Page(found, len(names), limit, offset)


def _record(row: Row) -> ResourcesUpdate:
    return ResourcesUpdate(row[0], row[1], row[2], row[3], unpack(row[4]))


_columns = [column for column in resources.columns if column.name != "change"]
_of_one = select(*_columns).where(resources.c.resources_id == bindparam("resources_id"))

INSERT = Statement(insert_into(resources, "change").on_conflict_do_nothing())
VERSION = Statement(_of_one.where(resources.c.version == bindparam("version")))
NEWEST = Statement(_of_one.order_by(resources.c.version.desc()).limit(1))
LATEST_CHANGE = Statement(select(*_columns).order_by(resources.c.change.desc()).limit(1))
NAMES = Statement(
    select(resources.c.resources_id).group_by(resources.c.resources_id).order_by(resources.c.resources_id)
)
KNOWN_RESOURCES = Statement(
    select(resources.c.resources_id).where(any_of(resources.c.resources_id, "ids")).distinct()
)
