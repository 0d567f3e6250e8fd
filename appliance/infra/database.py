"""
The connections of a process to its database: a SQLite file or PostgreSQL, by URL.

A process opens one `Database` and hands it to every store.  Every statement is bounded in time: a locked
file or a lost server is an error after seconds, never a writer or a control loop that hangs.  Commits are
durable when they return: with SQLite's `synchronous=NORMAL` a power cut can lose an acknowledged entry.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from sqlalchemy import Connection, Engine, Table, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from appliance.errors import ApplianceError, ConfigurationError

BUSY_SECONDS = 5.0
IDLE_CONNECTIONS = 5
"""Connections that stay open while no store uses them."""


class Database:
    """
    Engines on one database, shared by the stores of a process.

    Time-outs belong to a connection: opening one, and testing one from the pool, happen before anything knows
    which store asked.  So the lease and the limits, which give up sooner than the other stores, have an
    engine of their own.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._engines: dict[tuple[float, bool], Engine] = {}
        self._opening = threading.Lock()

    def engine(self, busy_seconds: float, *, reserved: bool = False) -> Engine:
        """
        The engine whose statements and waits for a lock end after `busy_seconds`.

        A `reserved` one keeps a connection open for one store alone, so that no other store can take the
        server's last connection from it.
        """
        with self._opening:
            key = busy_seconds, reserved
            if key not in self._engines:
                idle = 1 if reserved else IDLE_CONNECTIONS
                self._engines[key] = open_database(self.url, busy_seconds=busy_seconds, idle=idle)
            return self._engines[key]

    def close(self) -> None:
        for engine in tuple(self._engines.values()):
            engine.dispose()


class SqlStore:
    """
    Tables in a `Database` that other stores share; a URL opens one for this store alone.

    A store names its `subject`, and the error that callers get if the database fails.
    """

    subject: ClassVar[str]
    unavailable: ClassVar[type[ApplianceError]]

    def __init__(self, database: Database | str, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self._is_alone = isinstance(database, str)
        self.database = Database(database) if isinstance(database, str) else database
        self._engine = self.database.engine(busy_seconds)
        self._reader = self._engine.execution_options(writes=False)
        self._is_postgresql = self._engine.dialect.name == "postgresql"

    def close(self) -> None:
        if self._is_alone:
            self.database.close()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._errors("read"), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """After an error nothing may have been written, or everything."""
        with self._errors("written"), self._engine.begin() as connection:
            yield connection

    def _insert(self, table: Table) -> postgresql.Insert | sqlite.Insert:
        """An insert that may say what happens on a conflict."""
        return postgresql.insert(table) if self._is_postgresql else sqlite.insert(table)

    def _upsert(self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows, or give those with their primary keys these values."""
        if rows:
            insert = self._insert(table)
            keys = {column.name for column in table.primary_key}
            values = {name: insert.excluded[name] for name in rows[0] if name not in keys}
            connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=values), rows)

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise self.unavailable(f"{self.subject} could not be {verb}: {first_line(error)}") from error


def open_database(url: str, *, busy_seconds: float, idle: int = IDLE_CONNECTIONS) -> Engine:
    """
    An engine that connects when it is first used; ConfigurationError if the URL cannot be used.

    No thread waits for another's connection: one more is opened, and `idle` of them stay open.  So the number
    of threads bounds the number of connections, and every time-out is the database's alone.  With the
    execution option `writes=False`, transactions on SQLite do not take the write lock.
    """
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "postgresql":
            from appliance.infra.postgresql import open_postgresql  # noqa: PLC0415 - the driver is slow to import

            return open_postgresql(parsed, busy_seconds=busy_seconds, idle=idle)
        in_memory = parsed.database in {None, "", ":memory:"}
        engine = create_engine(parsed, **({} if in_memory else {"pool_size": idle, "max_overflow": -1}))
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise ConfigurationError(f"the database URL cannot be used: {first_line(error)}") from error
    if engine.dialect.name != "sqlite":
        message = f"the database URL cannot be used: {engine.dialect.name} is neither sqlite nor postgresql"
        raise ConfigurationError(message)
    _prepare_sqlite(engine, max(1, round(busy_seconds * 1000)))
    return engine


def first_line(error: object) -> str:
    """What a database error says, without its statement and parameters."""
    original = getattr(error, "orig", None) or error
    arguments = getattr(original, "args", None)
    if arguments and isinstance(arguments[0], dict):  # PostgreSQL's answer, by field
        return str(arguments[0].get("M", arguments[0])).partition("\n")[0]
    return str(original).partition("\n")[0]


def _use_write_ahead_log(connection: sqlite3.Connection, milliseconds: int) -> None:
    # SQLite does not wait here by itself: two processes that open a new file together would fail.
    deadline = time.monotonic() + milliseconds / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _prepare_sqlite(engine: Engine, milliseconds: int) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: object) -> None:
        # We begin transactions ourselves: the driver would leave reads and DDL outside of them.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
        _use_write_ahead_log(connection, milliseconds)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads before it writes could not wait for the write lock any more.
        immediate = connection.get_execution_options().get("writes", True)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
