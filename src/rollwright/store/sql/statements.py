"""SQL statements, written once with SQLAlchemy Core, compiled once per dialect, and executed on the bare driver.

A call on the hot path so costs no more than the driver: no compilation, no result objects. A statement gets the time from
`NOW`, which is `store_now()`: a function of the schema on PostgreSQL, of the connection on SQLite.

An operation is a generator: it yields calls of statements, is sent their rows, and does no I/O itself. So the same
operation runs on a SQLite connection in any thread and on PostgreSQL's asynchronous connection.
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ClauseElement, ColumnElement, Double, Table, bindparam, func, literal_column
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql import Insert, asyncpg, insert
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler


class Dialect(StrEnum):
    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


_DIALECTS: dict[Dialect, Any] = {
    Dialect.SQLITE: sqlite.dialect(paramstyle="qmark"),
    Dialect.POSTGRESQL: asyncpg.dialect(),  # type: ignore[no-untyped-call]
}

NOW: ColumnElement[float] = func.store_now(type_=Double)


class any_of(ColumnElement[bool]):
    """Whether a text column equals one of the values of a list parameter of any length."""

    inherit_cache = False

    def __init__(self, column: ColumnElement[Any], name: str) -> None:
        self.column = column
        self.parameter: ColumnElement[Any] = bindparam(name)


@compiles(any_of, Dialect.SQLITE)
def _any_of_sqlite(element: any_of, compiler: SQLCompiler, **options: Any) -> str:
    column = compiler.process(element.column, **options)
    return f"{column} IN (SELECT value FROM json_each({compiler.process(element.parameter, **options)}))"


@compiles(any_of, Dialect.POSTGRESQL)
def _any_of_postgresql(element: any_of, compiler: SQLCompiler, **options: Any) -> str:
    column = compiler.process(element.column, **options)
    return f"{column} = ANY(CAST({compiler.process(element.parameter, **options)} AS TEXT[]))"


Values = Mapping[str, Any] | tuple[Any, ...]
"""Values by name, or in the order of the placeholders, which for `insert_into` is that of the columns."""
Arguments = Callable[[Mapping[str, Any]], Sequence[Any]]


class Compiled(NamedTuple):
    sql: str
    by_name: Arguments
    """Puts values by name into the order of the placeholders; a missing one raises `KeyError`."""
    returns_rows: bool

    def arguments(self, values: Sequence[Values]) -> Iterable[Sequence[Any]]:
        """The arguments for each set of values; the sets of one call have the same form."""
        return values if values and type(values[0]) is tuple else map(self.by_name, values)  # type: ignore[arg-type, return-value]


def _arguments(order: Sequence[str], fixed: Mapping[str, Any]) -> Arguments:
    """`fixed`: values that belong to the statement."""
    pick = itemgetter(*order) if len(order) > 1 else lambda values: tuple(values[name] for name in order)
    return (lambda values: pick({**fixed, **values})) if fixed else pick


Row = Sequence[Any]
Result = TypeVar("Result")


Call = tuple["Statement", Sequence[Values]]
"""One statement, and the sets of values to execute it with, one after the other."""

Operation = Generator[Call, list[Row], Result]


def _lists_as_json(arguments: Arguments) -> Arguments:
    return lambda values: [json.dumps(each) if type(each) is list else each for each in arguments(values)]


def constant(value: str | int) -> ColumnElement[Any]:
    """A value in the statement's text instead of a parameter. Only for constants of this package: it is not escaped."""
    return literal_column(repr(value))


def insert_into(table: Table, *omitted: str) -> Insert:
    """An insert with a value for every column except `omitted`.

    Inline: SQLAlchemy then does not return computed keys, which would take one call per row.
    """
    names = [column.name for column in table.columns if column.name not in omitted]
    return insert(table).values({name: bindparam(name) for name in names}).inline()


class Statement:
    """A statement, compiled on first use. Operations execute it with `rows = yield FIND(rollout_id="ro-1")`."""

    def __init__(self, clause: ClauseElement) -> None:
        self._clause = clause

    @cached_property
    def sqlite(self) -> Compiled:
        return self._compiled(Dialect.SQLITE)

    @cached_property
    def postgresql(self) -> Compiled:
        return self._compiled(Dialect.POSTGRESQL)

    def _compiled(self, dialect: Dialect) -> Compiled:
        made = self._clause.compile(dialect=_DIALECTS[dialect])
        assert isinstance(made, SQLCompiler)
        fixed = {name: value for name, value in made.params.items() if value is not None}
        arguments = _arguments(made.positiontup or (), fixed)
        if "json_each" in str(made):
            arguments = _lists_as_json(arguments)
        changes = made.isinsert or made.isupdate or made.isdelete
        return Compiled(str(made), arguments, not changes or bool(made.effective_returning))

    def __call__(self, **values: Any) -> Call:
        return self, (values,)

    def many(self, values: Sequence[Values]) -> Call:
        return self, values
