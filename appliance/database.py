"""
Connections to the database that control shares between gateways: the audit log's own, by URL.

Small rows that are read often and written rarely.  Every statement is bounded in time, so that a
locked file or a lost server is an error of seconds, never a control loop that hangs.
"""

import sqlite3

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from appliance.errors import ConfigurationError


def open_database(url: str, *, busy_seconds: float) -> Engine:
    """
    An engine that connects when it is first used, and gives up on a busy database after so long.

    Raises:
        ConfigurationError: the URL cannot be used; whether anything answers there is not tried.
    """
    milliseconds = max(1, round(busy_seconds * 1000))
    is_postgresql = url.startswith("postgresql")
    arguments = {
        "connect_timeout": max(2, round(busy_seconds)),  # libpq takes no less than two seconds
        "options": f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}",
    }
    try:
        engine = create_engine(
            url, connect_args=arguments if is_postgresql else {}, pool_pre_ping=is_postgresql
        )
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        message = f"the database URL cannot be used: {first_line(error)}"
        raise ConfigurationError(message) from error
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine, milliseconds)
    return engine


def first_line(error: object) -> str:
    """What a database error says, without its statement and parameters."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


def _prepare_sqlite(engine: Engine, milliseconds: int) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: object) -> None:
        # We begin transactions ourselves: the driver would leave reads outside of them.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads before it writes could not wait for the write lock any more.
        immediate = connection.get_execution_options().get("writes", True)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
