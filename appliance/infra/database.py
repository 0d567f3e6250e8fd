"""
The one place that makes database engines: the audit log's, and those of what gateways share.

SQLite files and PostgreSQL, by URL.  Every statement is bounded in time, so that a locked file or a
lost server is an error of seconds, never a writer or a control loop that hangs.  Commits are
durable when they return: with SQLite's `synchronous=NORMAL` an acknowledged entry can be lost in a
power cut.
"""

import sqlite3

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from appliance.errors import ConfigurationError


def open_database(url: str, *, busy_seconds: float) -> Engine:
    """
    An engine that connects when it is first used, and gives up on a busy database after so long.

    With the execution option `writes=False`, transactions on SQLite do not take the write lock.

    Raises:
        ConfigurationError: the URL cannot be used; whether anything answers there is not tried.  When it is
            first used: the database has another encoding than UTF-8.
    """
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "postgresql":
            from appliance.infra.postgresql import open_postgresql  # noqa: PLC0415 - the driver is slow to import

            return open_postgresql(parsed, busy_seconds=busy_seconds)
        engine = create_engine(parsed)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        message = f"the database URL cannot be used: {first_line(error)}"
        raise ConfigurationError(message) from error
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


def _prepare_sqlite(engine: Engine, milliseconds: int) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: object) -> None:
        # We begin transactions ourselves: the driver would leave reads and DDL outside of them.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads before it writes could not wait for the write lock any more.
        immediate = connection.get_execution_options().get("writes", True)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
