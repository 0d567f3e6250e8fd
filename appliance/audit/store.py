"""
Where leaves are kept: the `AuditStore` protocol, and SQLAlchemy Core behind it.

Synchronous on purpose: `appliance.audit.log` calls it from one thread of its own; readers (export,
command line) open a store of their own.  The head moves by compare-and-swap, so two writers cannot
both append, whatever they believe.

SQLite: WAL with `synchronous=FULL`; with NORMAL an acknowledged entry can be lost in a power cut.
Fails closed: every database error is `AuditUnavailableError`, one line.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from sqlalchemy import Connection, Engine, bindparam, create_engine, event, func, insert, select, update
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from appliance.audit.merkle import EMPTY_ROOT, HASH_BYTES, CompactRange
from appliance.audit.registry import EntryType
from appliance.audit.tables import (
    SCHEMA_VERSION,
    audit_checkpoints,
    audit_head,
    audit_leaves,
    audit_schema,
    metadata,
)
from appliance.database import first_line
from appliance.errors import AuditEntryError, AuditError, AuditForkError, AuditUnavailableError

CHUNK = 4096
BUSY_MILLISECONDS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The tree as the store has it."""

    size: int
    root: bytes
    subtrees: tuple[bytes, ...] = field(compare=False)
    """Roots of the perfect subtrees, largest first; implied by the leaves, so not compared."""

    @classmethod
    def of(cls, tree: CompactRange) -> Self:
        """Return the head of a tree."""
        return cls(size=tree.size, root=tree.root(), subtrees=tree.subtrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One stored leaf; type and request id repeat what its bytes say, to be searched by."""

    index: int
    leaf: bytes
    leaf_hash: bytes
    type: str
    request_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint as it was published."""

    size: int
    note: str
    time: str


class AuditStore(Protocol):
    """
    What the log needs of a database; every method may raise `AuditUnavailableError`.

    A failed `append` may or may not have happened: read the head to know.
    """

    def head(self) -> Head:
        """Return the current head."""
        ...

    def append(self, leaves: Sequence[Leaf], *, expected: Head, new: Head) -> None:
        """
        Add leaves and move the head, in one durable transaction.

        Raises:
            AuditForkError: the head is not `expected`.
            AuditEntryError: a request is recorded twice; nothing was added.
        """
        ...

    def leaves(self, start: int, end: int) -> list[Leaf]:
        """Return the leaves with start <= index < end that exist, in order."""
        ...

    def leaf_hashes(self, end: int | None = None) -> Iterator[bytes]:
        """Yield the leaf hashes below `end` (default: all), in order of index."""
        ...

    def leaf_by_request(self, request_id: str) -> list[Leaf]:
        """Return everything recorded about one request, in order."""
        ...

    def open_intents(self) -> list[str]:
        """Return the ids of requests that have an intent and no end, in order of intent."""
        ...

    def save_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Keep a published checkpoint; one of the same size is replaced."""
        ...

    def latest_checkpoint(self) -> StoredCheckpoint | None:
        """Return the checkpoint with the largest size, or None."""
        ...


class SqlAuditStore:
    """An `AuditStore` in a SQL database."""

    def __init__(self, url: str) -> None:
        """
        Connect, and create the tables when there are none.

        Raises:
            AuditUnavailableError: the database cannot be used, or has another schema version.
        """
        try:
            self._engine = create_engine(url)
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise AuditUnavailableError(
                f"the audit database URL cannot be used: {first_line(error)}"
            ) from error
        self._where = self._engine.url.render_as_string(hide_password=True)
        if self._engine.dialect.name == "sqlite":
            _prepare_sqlite(self._engine)
        # Built once: this runs on every commit, and building it takes longer than running it.
        self._move = update(audit_head).where(
            audit_head.c.id == 1,
            audit_head.c.size == bindparam("old_size"),
            audit_head.c.root == bindparam("old_root"),
        )
        with self._transaction("opened") as connection:
            _create_schema(connection)

    def close(self) -> None:
        """Give back every connection."""
        self._engine.dispose()

    def head(self) -> Head:  # noqa: D102 - see the protocol
        with self._transaction("read") as connection:
            row = connection.execute(select(audit_head).where(audit_head.c.id == 1)).one()
        subtrees = tuple(row.frontier[at : at + HASH_BYTES] for at in range(0, len(row.frontier), HASH_BYTES))
        return Head(size=row.size, root=row.root, subtrees=subtrees)

    def append(self, leaves: Sequence[Leaf], *, expected: Head, new: Head) -> None:  # noqa: D102
        move = {
            "old_size": expected.size,
            "old_root": expected.root,
            "size": new.size,
            "root": new.root,
            "frontier": b"".join(new.subtrees),
        }
        rows = [
            {
                "idx": leaf.index,
                "leaf": leaf.leaf,
                "leaf_hash": leaf.leaf_hash,
                "type": leaf.type,
                "request_id": leaf.request_id,
            }
            for leaf in leaves
        ]
        with self._transaction("written") as connection:
            # The head comes first: it takes the write lock, so the comparison still holds at commit.
            if connection.execute(self._move, move).rowcount != 1:
                raise AuditForkError(f"another writer moved the audit log on from size {expected.size}")
            connection.execute(insert(audit_leaves), rows)
        # A crash before this line: the caller never hears of entries that may be in the log.

    def leaves(self, start: int, end: int) -> list[Leaf]:  # noqa: D102
        query = select(audit_leaves).where(audit_leaves.c.idx >= start, audit_leaves.c.idx < end)
        return self._leaves(query.order_by(audit_leaves.c.idx))

    def leaf_hashes(self, end: int | None = None) -> Iterator[bytes]:  # noqa: D102
        # In chunks by key, each its own transaction: leaves never change, and a reader that held
        # one open throughout would keep SQLite from trimming its write-ahead log.
        after = -1
        query = select(audit_leaves.c.idx, audit_leaves.c.leaf_hash).order_by(audit_leaves.c.idx).limit(CHUNK)
        while True:
            chunk = query.where(audit_leaves.c.idx > after)
            if end is not None:
                chunk = chunk.where(audit_leaves.c.idx < end)
            with self._transaction("read") as connection:
                rows = connection.execute(chunk).all()
            yield from (row.leaf_hash for row in rows)
            if len(rows) < CHUNK:
                return
            after = rows[-1].idx

    def leaf_by_request(self, request_id: str) -> list[Leaf]:  # noqa: D102
        query = select(audit_leaves).where(audit_leaves.c.request_id == request_id)
        return self._leaves(query.order_by(audit_leaves.c.idx))

    def open_intents(self) -> list[str]:  # noqa: D102
        intent, end = audit_leaves.alias("intent"), audit_leaves.alias("closing")
        closed = select(end.c.idx).where(
            end.c.type.in_([kind.value for kind in EntryType if kind.closes_request]),
            end.c.request_id == intent.c.request_id,
        )
        query = select(intent.c.idx, intent.c.request_id).where(
            intent.c.type == EntryType.REQUEST_INTENT.value, ~closed.exists()
        )
        with self._transaction("read") as connection:
            # Ordered here: asked to order by index, SQLite would read every leaf instead of one index.
            return [row.request_id for row in sorted(connection.execute(query), key=lambda row: row.idx)]

    def save_checkpoint(self, checkpoint: StoredCheckpoint) -> None:  # noqa: D102
        table, values = audit_checkpoints, {"note": checkpoint.note, "time": checkpoint.time}
        with self._transaction("written") as connection:
            known = connection.execute(update(table).where(table.c.size == checkpoint.size).values(values))
            if not known.rowcount:
                connection.execute(insert(table).values(size=checkpoint.size, **values))

    def latest_checkpoint(self) -> StoredCheckpoint | None:  # noqa: D102
        query = select(audit_checkpoints).order_by(audit_checkpoints.c.size.desc()).limit(1)
        with self._transaction("read") as connection:
            row = connection.execute(query).one_or_none()
        return StoredCheckpoint(size=row.size, note=row.note, time=row.time) if row else None

    def _leaves(self, query: Any) -> list[Leaf]:  # noqa: ANN401 - a select of whole rows
        with self._transaction("read") as connection:
            rows = connection.execute(query).all()
        return [
            Leaf(
                index=row.idx,
                leaf=row.leaf,
                leaf_hash=row.leaf_hash,
                type=row.type,
                request_id=row.request_id,
            )
            for row in rows
        ]

    @contextmanager
    def _transaction(self, verb: str) -> Iterator[Connection]:
        """Run one transaction; whatever the database says becomes one of our errors."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except AuditError:
            raise
        except IntegrityError as error:
            detail = first_line(error)
            if "request_id" in detail:
                raise AuditEntryError(
                    "a request cannot be recorded twice: request ids are never reused"
                ) from error
            raise AuditForkError(f"the audit log holds leaves its head does not know of: {detail}") from error
        except SQLAlchemyError as error:
            detail = first_line(error)
            raise AuditUnavailableError(
                f"the audit database {self._where} could not be {verb}: {detail}"
            ) from error


def _create_schema(connection: Connection) -> None:
    metadata.create_all(connection)
    version = connection.scalar(select(func.max(audit_schema.c.version)))
    if version is None:
        connection.execute(insert(audit_schema).values(version=SCHEMA_VERSION))
        connection.execute(insert(audit_head).values(id=1, size=0, root=EMPTY_ROOT, frontier=b""))
    elif version != SCHEMA_VERSION:
        raise AuditUnavailableError(
            f"the audit database has schema version {version}; this appliance knows {SCHEMA_VERSION}"
        )


def _prepare_sqlite(engine: Engine) -> None:
    if engine.url.database in {None, "", ":memory:"}:
        raise AuditUnavailableError("the audit database must be a file: in memory, nothing would be durable")

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: object) -> None:
        # We begin transactions ourselves: the driver would leave reads and DDL outside of them.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")
