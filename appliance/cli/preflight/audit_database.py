"""The audit log's database: whether it answers, is up to date, is writable, and agrees on the time."""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, make_url, text
from sqlalchemy.exc import SQLAlchemyError

from appliance.cli.preflight.check import Check, Inquiry, SkippedError, Subject, family
from appliance.errors import ApplianceError
from appliance.infra import schema
from appliance.infra.database import first_line, open_database

REACHABLE = Subject("database.reachable", "Database")
SCHEMA = Subject("database.schema", "Tables")
WRITABLE = Subject("database.writable", "Rights")
DRIFT = Subject("database.clock", "Clocks agree")
BUSY_SECONDS = 5.0
DRIFT_SECONDS, GREATEST_DRIFT_SECONDS = 1.0, 5.0
OLDEST_POSTGRESQL = 15
NEEDED = {"audit_leaves": ("SELECT", "INSERT"), "audit_head": ("SELECT", "UPDATE")}
FORBIDDEN = {"audit_leaves": ("UPDATE", "DELETE", "TRUNCATE")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDatabase:
    """State of a database that answers."""

    name: str
    """Kind and version, such as `PostgreSQL 15.10`."""
    major: int | None
    """PostgreSQL's major version; None for SQLite."""
    empty: bool
    """Whether it has no tables of the appliance."""
    current: bool
    """Whether the tables have this appliance's version."""
    lacking: tuple[str, ...]
    """Missing rights of the gateway's role, such as `INSERT on audit_leaves`."""
    excessive: tuple[str, ...]
    """Rights that the role should not have."""
    read_only: bool
    drift_seconds: float | None
    """How far its clock is ahead of ours; None if both use the same clock."""


@family(REACHABLE, SCHEMA, WRITABLE, DRIFT)
def check_database(inquiry: Inquiry) -> Iterable[Check]:
    """Connect as the gateway does; nothing is written, created or upgraded."""
    inquiry.require_gateway()
    if _is_missing(inquiry):
        yield REACHABLE.ok("SQLite; the first start creates it")
        raise SkippedError("there is no database yet")
    todo = "check audit.database_url, the server, and the network between"
    try:
        seen = inspect_database(inquiry.installation.database_url, inquiry)
    except ApplianceError as error:
        todo = "see docs/how-to/use-postgresql.md for how to create the database and write the URL"
        yield REACHABLE.fail(str(error), todo)
    except SQLAlchemyError as error:
        yield REACHABLE.fail(f"it does not answer: {first_line(error)}", todo)
    except OSError as error:
        yield REACHABLE.fail(f"it cannot be reached: {error}", todo)
    else:
        yield judge_reachable(seen)
        yield judge_schema(seen)
        yield judge_rights(seen)
        yield judge_drift(seen.drift_seconds)
        return
    raise SkippedError("the database does not answer")


def log_is_current(inquiry: Inquiry) -> bool:
    """Whether there is a log with current tables; the query changes nothing."""
    if _is_missing(inquiry):
        return False
    try:
        engine = open_database(inquiry.installation.database_url, busy_seconds=BUSY_SECONDS)
        try:
            with engine.execution_options(writes=False).connect() as connection:
                return schema.check(connection)
        finally:
            engine.dispose()
    except (ApplianceError, SQLAlchemyError, OSError):
        return False


def inspect_database(url: str, inquiry: Inquiry) -> SeenDatabase:
    """
    Raises ApplianceError if the URL is unusable or the tables are newer than this appliance.

    Raises SQLAlchemyError or OSError if the database does not answer.
    """
    engine = open_database(url, busy_seconds=BUSY_SECONDS)
    try:
        with engine.execution_options(writes=False).connect() as connection:
            current = schema.check(connection)
            empty = not inspect(connection).has_table(schema.VERSION_TABLE)
            if engine.dialect.name == "postgresql":
                return _postgresql(connection, inquiry, current=current, empty=empty)
            version = connection.scalar(text("SELECT sqlite_version()"))
        return SeenDatabase(
            name=f"SQLite {version}",
            major=None,
            empty=empty,
            current=current,
            lacking=(),
            excessive=(),
            read_only=_is_read_only(engine),
            drift_seconds=None,
        )
    finally:
        engine.dispose()


def judge_reachable(seen: SeenDatabase) -> Check:
    if seen.major is not None and seen.major < OLDEST_POSTGRESQL:
        todo = f"PostgreSQL {OLDEST_POSTGRESQL} is the oldest tested version"
        return REACHABLE.warn(f"{seen.name} answers", todo)
    return REACHABLE.ok(f"{seen.name} answers")


def judge_schema(seen: SeenDatabase) -> Check:
    """Whether the tables are current: a start upgrades a SQLite file, the owner upgrades PostgreSQL."""
    if seen.current:
        return SCHEMA.ok(f"at step {schema.NEWEST}, the newest")
    what = "there are none yet" if seen.empty else f"they are older than step {schema.NEWEST}"
    if seen.major is not None:
        todo = "run `appliance audit upgrade-database --url ...` as the role that owns the database"
        return SCHEMA.fail(what, todo)
    return SCHEMA.warn(f"{what}; the next start upgrades them", "back the data directory up first")


def judge_rights(seen: SeenDatabase) -> Check:
    """Whether a gateway may append to the log, and nothing else."""
    if seen.read_only:
        todo = "use the primary server, or make the file writable for this account"
        return WRITABLE.fail("it is read-only", todo)
    if seen.lacking:
        todo = "run what `appliance audit grants --role ROLE` prints, as the owner"
        return WRITABLE.fail(f"this role lacks {', '.join(seen.lacking)}", todo)
    if seen.excessive:
        todo = "connect as a role that does not own the tables: `appliance audit grants --role ROLE`"
        return WRITABLE.warn(f"this role has {', '.join(seen.excessive)}", todo)
    return WRITABLE.ok(f"entries can be appended{'' if seen.major is None else ', not changed'}")


def judge_drift(seconds: float | None) -> Check:
    if seconds is None:
        return DRIFT.skipped("the database uses this machine's clock")
    seen = f"the database's is {abs(seconds):.2f} s {'ahead' if seconds >= 0 else 'behind'}"
    todo = "synchronise both machines with the same time server"
    if abs(seconds) > GREATEST_DRIFT_SECONDS:
        return DRIFT.fail(seen, todo)
    if abs(seconds) > DRIFT_SECONDS:
        return DRIFT.warn(seen, todo)
    return DRIFT.ok(seen)


def _postgresql(connection: Connection, inquiry: Inquiry, *, current: bool, empty: bool) -> SeenDatabase:
    version = str(connection.scalar(text("SHOW server_version")))
    begin = inquiry.clock()
    theirs = float(connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())")))
    drift = theirs - (begin + inquiry.clock()) / 2
    read_only = str(connection.scalar(text("SHOW transaction_read_only"))) == "on"
    return SeenDatabase(
        name=f"PostgreSQL {version.partition(' ')[0]}",
        major=int(version.partition(".")[0].partition(" ")[0]),
        empty=empty,
        current=current,
        lacking=tuple(_rights(connection, NEEDED, held=False)) if current else (),
        excessive=tuple(_rights(connection, FORBIDDEN, held=True)) if current else (),
        read_only=read_only,
        drift_seconds=drift,
    )


def _rights(connection: Connection, asked: Mapping[str, tuple[str, ...]], *, held: bool) -> Iterable[str]:
    question = text("SELECT has_table_privilege(:table, :right)")
    for table, rights in asked.items():
        for right in rights:
            if connection.scalar(question, {"table": table, "right": right}) is held:
                yield f"{right} on {table}"


def _is_missing(inquiry: Inquiry) -> bool:
    url = inquiry.installation.database_url
    return inquiry.uses_sqlite and not Path(make_url(url).database or "").exists()


def _is_read_only(engine: Engine) -> bool:
    """Whether the write lock is unavailable; a current writer is waited for."""
    try:
        with closing(engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute("BEGIN IMMEDIATE")
            cursor.execute("ROLLBACK")
    except Exception as error:  # noqa: BLE001 - the driver's own, of whatever kind
        return "readonly" in str(error) or "read-only" in str(error)
    return False
