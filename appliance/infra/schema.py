"""
Which version the log's tables have, how they are upgraded, and the rights of each role.

A SQLite file is upgraded when it is opened.  On PostgreSQL the gateway's role cannot create tables, on
purpose: the owner's role upgrades with `appliance audit upgrade-database`, the gateway only checks.  Fails
closed: tables of another version are neither read nor written.
"""

import sqlite3
from pathlib import Path

from sqlalchemy import Column, Connection, Integer, MetaData, Table, Text, func, inspect, select, text
from sqlalchemy.engine.reflection import Inspector
from sqlalchemy.exc import SQLAlchemyError

from appliance.errors import AuditUnavailableError, ConfigurationError
from appliance.infra.database import first_line, open_database

VERSION_TABLE = "audit_migrations"
NEWEST = "0013"
KNOWN = tuple(f"{number:04}" for number in range(1, int(NEWEST) + 1))
MIGRATIONS = Path(__file__).with_name("migrations")
NEWEST_ON_SQLITE = MIGRATIONS / "newest_on_sqlite.sql"
"""What all migrations make of a new file; written by `python -m docs.generate`."""
UPGRADE_SECONDS = 600.0
SCHEMA_VERSION = 1
"""Of databases from before there were migrations, in a table of its own."""

_versions = Table(VERSION_TABLE, MetaData(), Column("version_num", Text))
_schema = Table("audit_schema", MetaData(), Column("version", Integer, primary_key=True, autoincrement=False))

# What a gateway does with each table; DELETE nowhere near the log itself, except where entries wait for it:
# the owner disposes of entries.
_RIGHTS = {
    "audit_leaves": "SELECT, INSERT",
    "audit_tile_hashes": "SELECT, INSERT",
    "audit_open_requests": "SELECT",
    "audit_disposal": "SELECT",
    "audit_kept": "SELECT",
    "audit_head": "SELECT, UPDATE",
    "audit_pending": "SELECT, INSERT, DELETE",
    "audit_checkpoints": "SELECT, INSERT, UPDATE",
    "audit_payloads": "SELECT, INSERT, UPDATE, DELETE",
    "audit_writers": "SELECT, INSERT, UPDATE",
    "audit_cosigned": "SELECT, INSERT, DELETE",
    "audit_timestamps": "SELECT, INSERT",
    "audit_forwarding": "SELECT, INSERT, UPDATE",
    "audit_schema": "SELECT",
    VERSION_TABLE: "SELECT",
    "control_lease": "SELECT, INSERT, UPDATE",
    "speculation_override": "SELECT, INSERT, UPDATE, DELETE",
    "tenants": "SELECT, INSERT, UPDATE, DELETE",
    "api_keys": "SELECT, INSERT, UPDATE, DELETE",
    "tenancy_generation": "SELECT, UPDATE",
    "approvals": "SELECT, INSERT, DELETE",
    "limit_books": "SELECT, INSERT, UPDATE",
    "batch_files": "SELECT, INSERT, UPDATE, DELETE",
    "batches": "SELECT, INSERT, UPDATE, DELETE",
    "cost_periods": "SELECT, INSERT, UPDATE, DELETE",
    "cost_shares": "SELECT, INSERT, UPDATE, DELETE",
    "cost_workers": "SELECT, INSERT, UPDATE, DELETE",
}


def check(connection: Connection) -> bool:
    """Whether the tables are of the version this appliance works with; False if they are older."""
    if connection.dialect.name == "postgresql" and connection.scalar(text("SHOW fsync")) != "on":
        raise AuditUnavailableError(
            "the PostgreSQL server runs with fsync off, so what it acknowledges can be lost: switch it on"
        )
    found: Inspector = inspect(connection)
    if found.has_table(_schema.name):
        version = connection.scalar(select(func.max(_schema.c.version)))
        if version is not None and version != SCHEMA_VERSION:
            raise AuditUnavailableError(
                f"the audit database has schema version {version}; this appliance knows {SCHEMA_VERSION}"
            )
    if not found.has_table(VERSION_TABLE):
        return False
    step = connection.scalar(select(_versions.c.version_num))
    if step is not None and step not in KNOWN:
        raise AuditUnavailableError(
            f"the audit database is at step {step}, and this appliance knows steps up to {NEWEST}: "
            "use the newer appliance that upgraded it"
        )
    return step == NEWEST


def upgrade(connection: Connection) -> None:
    """Bring the tables to the newest version, in the transaction the connection is in."""
    if connection.dialect.name == "sqlite" and not inspect(connection).get_table_names():
        _create(connection)
    else:
        migrate(connection)


def _create(connection: Connection) -> None:
    """Make the tables in a new file; running every migration would delay a gateway's first start."""
    statement = ""
    for line in NEWEST_ON_SQLITE.read_text(encoding="utf-8").splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.exec_driver_sql(statement)
            statement = ""


def migrate(connection: Connection, to: str = NEWEST) -> None:
    """Run the migrations that the tables have not had, up to one step."""
    # Loaded only here: a database that is up to date, which is nearly every one, never needs it.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, to)


def upgrade_database(url: str, *, grant_to: str | None = None) -> None:
    """
    Bring a database's tables to the newest version; `url` is of a role that may create tables.

    `grant_to` is a role that gets the rights of a gateway (`grants`) in the same transaction.
    """
    engine = open_database(url, busy_seconds=UPGRADE_SECONDS)
    if grant_to is not None and engine.dialect.name != "postgresql":
        raise ConfigurationError("rights are granted to a role of PostgreSQL only: leave --grant-to out")
    try:
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                # Two upgrades at once take turns, and no entry comes in between.
                connection.execute(text("SELECT pg_advisory_xact_lock(6962)"))
            if not check(connection):
                upgrade(connection)
            if grant_to is not None:
                for statement in grants(grant_to).splitlines():
                    connection.exec_driver_sql(statement)
    except SQLAlchemyError as error:
        where = engine.url.render_as_string(hide_password=True)
        raise AuditUnavailableError(
            f"the audit database {where} could not be upgraded: {first_line(error)}"
        ) from error
    finally:
        engine.dispose()


def grants(role: str, *, quote: str = '"') -> str:
    """Return the SQL that lets a role append to the log and read it, and nothing beyond."""
    name = quote + role.replace(quote, quote * 2) + quote
    lines = [f"REVOKE ALL ON {', '.join(_RIGHTS)} FROM {name};"]
    lines += [f"GRANT {rights} ON {table} TO {name};" for table, rights in _RIGHTS.items()]
    return "\n".join(lines) + "\n"
