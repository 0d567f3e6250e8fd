"""
Where leaves are kept: SQLAlchemy Core on SQLite or PostgreSQL.

The head moves by compare-and-swap, so two writers cannot both append at the same index.  The order of entries
is that of the head's moves: numbers from a database sequence would commit out of order.

On PostgreSQL several gateways may write.  They accept entries side by side, and one of them moves the head
(`appliance.audit.shared_writer`).  They take turns by an advisory lock, which only saves retries; the
comparison is what keeps the log consistent.  Fails closed: every database error is `AuditUnavailableError`,
one line.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, insert, literal, select, text, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from appliance.audit import pending_rows
from appliance.audit.entry_types import EntryType
from appliance.audit.integration import AcceptedRow
from appliance.audit.merkle import split_hashes
from appliance.audit.pending import NOT_PLACED
from appliance.audit.pending_rows import FENCE, Fence, Integrate, Observed, Registered, Writing
from appliance.audit.sqlite_append import SqliteAppender
from appliance.audit.stored import (
    AuditStore,
    Behind,
    Disposal,
    Head,
    KeptLeaf,
    Leaf,
    OpenRequest,
    StoredCheckpoint,
    gateway_of,
)
from appliance.audit.tables import (
    audit_checkpoints,
    audit_disposal,
    audit_head,
    audit_kept,
    audit_leaves,
    audit_open_requests,
    audit_pending,
    audit_writers,
)
from appliance.audit.tiles import TileHashes, completes_tile, tile_rows
from appliance.errors import AuditEntryError, AuditError, AuditForkError, AuditUnavailableError
from appliance.infra import schema
from appliance.infra.database import BUSY_SECONDS, Database, SqlStore, first_line

__all__ = [
    "AuditStore",
    "Behind",
    "Disposal",
    "Head",
    "KeptLeaf",
    "Leaf",
    "OpenRequest",
    "SqlAuditStore",
    "StoredCheckpoint",
    "gateway_of",
]

CHUNK = 4096
FILL_ROWS = 64
"""Rows added per transaction where they are missing: 16,384 entries, during which no other writer commits."""
_COLUMNS = tuple(column.name for column in audit_leaves.columns)
# One array per column: with a parameter per value, a batch takes ten times as long.
_INSERT = text(
    f"INSERT INTO audit_leaves ({', '.join(_COLUMNS)}) SELECT * FROM unnest(CAST(:idx AS bigint[]), "  # noqa: S608 - names of ours
    "CAST(:leaf AS bytea[]), CAST(:leaf_hash AS bytea[]), CAST(:type AS text[]), CAST(:request_id AS text[]))"
)
# Any number, the same for every writer.
_TURN = text("SELECT pg_advisory_xact_lock(6962)")


class SqlAuditStore(SqlStore):
    def __init__(
        self,
        database: Database | str,
        *,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        """
        Connect; a SQLite file is made or upgraded, PostgreSQL must have its tables.

        `progress` is that of `complete`, which finishes the upgrade of a log from before there were tiles.
        Raises ConfigurationError, or AuditUnavailableError, also if the tables are of another version.
        """
        super().__init__(database)
        # The writer's connection is reserved; on SQLite it is the appender's, held from the first append on.
        self._writer = (
            self.database.engine(BUSY_SECONDS, reserved=True) if self._is_postgresql else self._engine
        )
        self._where = self._engine.url.render_as_string(hide_password=True)
        self._sqlite = None if self._is_postgresql else SqliteAppender(self._engine)
        if not self._is_postgresql and self._engine.url.database in {None, "", ":memory:"}:
            raise AuditUnavailableError(
                "the audit database must be a file: in memory, nothing would be durable"
            )
        # Built once: this runs on every commit, and building it takes longer than running it.
        self._move = update(audit_head).where(
            audit_head.c.id == 1,
            audit_head.c.size == bindparam("old_size"),
            audit_head.c.root == bindparam("old_root"),
        )
        self._move_fenced = self._move.where(text(FENCE))
        try:
            self._check_schema()
            self.complete(progress)
        except BaseException:
            self.close()
            raise

    @property
    def shared(self) -> bool:
        return self._is_postgresql

    def close(self) -> None:
        if self._sqlite is not None:
            self._sqlite.close()
        super().close()

    def head(self) -> Head:
        with self._reading() as connection:
            return _read_head(connection)

    def append(
        self, leaves: Sequence[Leaf], *, expected: Head, new: Head, fence: Fence | None = None
    ) -> None:
        if self._sqlite is not None:
            with self._errors("written"):
                self._sqlite.append(leaves, expected=expected, new=new)
            return
        with self._writing() as connection:
            self._write(connection, leaves, expected=expected, new=new, fence=fence)
        # A crash before this line: entries may be in the log that the caller does not know of.

    def append_behind(self, size: int, make: Behind, *, fence: Fence | None = None) -> None:
        with self._writing() as connection:
            head = _read_head(connection)
            leaves, new = make(head, read_leaves(connection, size, head.size))
            if leaves:
                self._write(connection, leaves, expected=head, new=new, fence=fence)
        # A crash before this line: as above.

    # What follows is for PostgreSQL only.

    def register(self, writing: Writing, now: float, *, again: bool = False) -> Registered:
        """
        Begin to write under a new epoch: nothing is being written any more under an older one.

        `again` is for the process that registered last; raises AuditForkError if that was another.
        """
        with self._writing() as connection:
            return pending_rows.register(connection, writing, now, again=again)

    def accept(self, writing: Writing, rows: Sequence[AcceptedRow]) -> None:
        """
        Keep entries until they are integrated, in one durable transaction.

        Raises AuditEntryError if a request would begin or end twice, or end without an intent, AuditForkError
        if this gateway was declared dead: nothing was added.
        """
        with self._writing(turn=False) as connection:
            pending_rows.accept(connection, writing, rows)
        # A crash before this line: the entries may be durable, and are not acknowledged.

    def integrate(
        self,
        size: int,
        make: Integrate,
        *,
        fence: Fence,
        dead: Sequence[str] = (),
        silent_since: float = 0.0,
        end_requests: Callable[[Head, Sequence[OpenRequest]], tuple[Sequence[Leaf], Head]] | None = None,
    ) -> list[str]:
        """
        Move what others accepted into the tree, in one transaction.

        Of `dead` gateways, those without a heartbeat since `silent_since` can accept nothing any more, and
        the leaves that `end_requests` makes for the requests they left open are added behind their entries;
        returns them.  Raises AuditForkError if the head moved or the fence does not hold: nothing was done.
        """
        with self._writing() as connection:
            if not pending_rows.is_held(connection, fence):
                raise AuditForkError("another gateway integrates the audit log")
            # First: what they are accepting is then complete, and integrated before its requests are ended.
            gone = pending_rows.declare_dead(connection, dead, silent_since) if dead else []
            head = _read_head(connection)
            newer = pending_rows.tree_hashes(connection, size, head.size, CHUNK)
            # All of them: an end behind those that are read would be followed by another end.
            plan = pending_rows.next_rows(connection, None if gone else pending_rows.INTEGRATED_ROWS)
            new = make(head, newer, plan)
            if plan.ends:
                self._advance(connection, expected=head, new=new, fence=fence)
                pending_rows.move(connection, plan, head.size)
                if completes_tile(head.size, new.size):
                    tiles_of(connection).complete(new.size)
            if end_requests is not None:
                known = set(_read_writers(connection))
                left = [
                    one for one in _read_open(connection) if one.gateway in gone or one.gateway not in known
                ]
                leaves, newest = end_requests(new, left)
                if leaves:
                    self._write(connection, leaves, expected=new, new=newest, fence=fence)
            return gone

    def is_waiting(self) -> bool:
        """Whether there are entries to integrate."""
        with self._reading() as connection:
            return pending_rows.is_waiting(connection)

    def observe(self, gateway: str, size: int) -> Observed:
        """Read this gateway's own entries, then the hashes of the tree from `size` on."""
        with self._reading() as connection:
            writing, pending = pending_rows.read_own(connection, gateway)
            checkpoint = _latest_checkpoint(connection)
            head = _read_head(connection)
            return Observed(
                writing=writing,
                pending=pending,
                checkpoint=checkpoint,
                head=head,
                leaf_hashes=pending_rows.tree_hashes(connection, size, head.size, CHUNK),
            )

    def leaves(self, start: int, end: int) -> list[Leaf]:
        with self._reading() as connection:
            return read_leaves(connection, start, end)

    def hashes(self, level: int, start: int, end: int) -> list[bytes]:
        with self._reading() as connection:
            found = tiles_of(connection).read(level, start, end)
        if level and len(found) < end - start:
            # A gateway of a version without them may have appended the leaves.
            self.complete()
            with self._reading() as connection:
                return tiles_of(connection).read(level, start, end)
        return found

    def complete(self, progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        """
        Add the hashes that are missing behind the newest of each level; a crash anywhere loses no work.

        `progress` is called with the hashes there are and their total, if any is missing.
        """
        while True:
            with self._reading() as connection:
                size = _read_head(connection).size
                stored, total = tiles_of(connection).stored(size), tile_rows(size)
            if stored == total:
                return
            progress(stored, total)
            with self._writing() as connection:
                if tiles_of(connection).complete(size, most=FILL_ROWS):
                    progress(total, total)
                    return

    def accepted_leaves(self) -> list[Leaf]:
        if not self._is_postgresql:
            return []
        # Without rows that were changed and left out: they stay in the table as evidence.
        query = (
            select(audit_pending, literal(NOT_PLACED).label("idx"))
            .outerjoin(audit_writers, audit_writers.c.gateway == audit_pending.c.gateway)
            .where(audit_pending.c.seq > func.coalesce(audit_writers.c.integrated_seq, 0))
        )
        with self._reading() as connection:
            return [_leaf(row) for row in connection.execute(query)]

    def disposal(self) -> Disposal:
        with self._reading() as connection:
            return read_disposal(connection)

    def kept(self, start: int, end: int) -> list[KeptLeaf]:
        paths = audit_leaves.outerjoin(audit_kept, audit_kept.c.idx == audit_leaves.c.idx)
        query = select(audit_leaves, audit_kept.c.path).select_from(paths)
        query = query.where(audit_leaves.c.idx >= start, audit_leaves.c.idx < end)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(audit_leaves.c.idx)).all()
        return [KeptLeaf(leaf=_leaf(row), path=split_hashes(row.path or b"")) for row in rows]

    def leaf_by_request(self, request_id: str) -> list[Leaf]:
        query = select(audit_leaves).where(audit_leaves.c.request_id == request_id)
        with self._reading() as connection:
            return [_leaf(row) for row in connection.execute(query.order_by(audit_leaves.c.idx))]

    def leaves_of(self, types: Sequence[EntryType]) -> Iterator[Leaf]:
        """The leaves of these types in order: reads the whole log, once, for a command or an upgrade."""
        after, query = -1, select(audit_leaves).where(audit_leaves.c.type.in_([each.value for each in types]))
        while True:
            chunk = query.where(audit_leaves.c.idx > after).order_by(audit_leaves.c.idx).limit(CHUNK)
            with self._reading() as connection:
                found = [_leaf(row) for row in connection.execute(chunk)]
            yield from found
            if len(found) < CHUNK:
                return
            after = found[-1].index

    def open_intents(self) -> list[str]:
        return [request.request_id for request in self.open_requests()]

    def open_requests(self) -> list[OpenRequest]:
        with self._reading() as connection:
            return _read_open(connection)

    def beat(self, gateway: str, now: float) -> dict[str, float]:
        row = {"gateway": gateway, "seen_at": now}
        with self._writing(turn=False) as connection:
            self._upsert(connection, audit_writers, [row])
            return _read_writers(connection)

    def writers(self) -> dict[str, float]:
        with self._reading() as connection:
            return _read_writers(connection)

    def save_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        row = {"size": checkpoint.size, "note": checkpoint.note, "time": checkpoint.time}
        with self._writing(turn=False) as connection:
            self._upsert(connection, audit_checkpoints, [row])

    def latest_checkpoint(self) -> StoredCheckpoint | None:
        with self._reading() as connection:
            return _latest_checkpoint(connection)

    def _write(
        self,
        connection: Connection,
        leaves: Sequence[Leaf],
        *,
        expected: Head,
        new: Head,
        fence: Fence | None = None,
    ) -> None:
        rows = [row_of(leaf) for leaf in leaves]
        self._advance(connection, expected=expected, new=new, fence=fence)
        if self._is_postgresql:
            connection.execute(_INSERT, {name: [row[name] for row in rows] for name in _COLUMNS})
        else:
            connection.execute(insert(audit_leaves), rows)
        if completes_tile(expected.size, new.size):
            tiles_of(connection).complete(new.size)

    def _advance(
        self, connection: Connection, *, expected: Head, new: Head, fence: Fence | None = None
    ) -> None:
        # The head comes before the leaves: its row stays locked, so the comparison still holds at commit.
        move = {
            "old_size": expected.size,
            "old_root": expected.root,
            "size": new.size,
            "root": new.root,
            "frontier": b"".join(new.subtrees),
        }
        statement = self._move
        if fence is not None:
            statement, move = self._move_fenced, {**move, **fence.parameters()}
        if connection.execute(statement, move).rowcount != 1:
            raise AuditForkError(f"another writer extended the audit log from size {expected.size}")

    def _check_schema(self) -> None:
        with self._errors("opened"):
            with self._reader.begin() as connection:
                if schema.check(connection):
                    return
            if self._is_postgresql:
                raise AuditUnavailableError(
                    f"the audit database {self._where} is not up to date: "
                    "run `appliance audit upgrade-database` as the role that owns it"
                )
            with self._engine.begin() as connection:
                # Checked again: another process may have upgraded it while we waited for the lock.
                if not schema.check(connection):
                    schema.upgrade(connection)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._errors("read"), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def _writing(self, *, turn: bool = True) -> Iterator[Connection]:
        with self._errors("written"), self._writer.begin() as connection:
            if turn and self._is_postgresql:
                connection.execute(_TURN)
            yield connection

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except AuditError:
            raise
        except (IntegrityError, sqlite3.IntegrityError) as error:
            detail = first_line(error)
            if "request_id" in detail:
                raise AuditEntryError(
                    "a request cannot be recorded twice: request ids are never reused"
                ) from error
            raise AuditForkError(f"the audit log holds leaves its head does not know of: {detail}") from error
        except (SQLAlchemyError, sqlite3.Error) as error:
            detail = first_line(error)
            raise AuditUnavailableError(
                f"the audit database {self._where} could not be {verb}: {detail}"
            ) from error


def row_of(leaf: Leaf) -> dict[str, Any]:
    return {
        "idx": leaf.index,
        "leaf": leaf.leaf,
        "leaf_hash": leaf.leaf_hash,
        "type": leaf.type,
        "request_id": leaf.request_id,
    }


def tiles_of(connection: Connection) -> TileHashes:
    mark = "%s" if connection.dialect.name == "postgresql" else "?"
    return TileHashes(connection.exec_driver_sql, mark)


def read_disposal(connection: Connection) -> Disposal:
    row = connection.execute(select(audit_disposal).where(audit_disposal.c.id == 1)).one_or_none()
    return Disposal(below=row.below, index=row.idx) if row else Disposal()


def _read_head(connection: Connection) -> Head:
    row = connection.execute(select(audit_head).where(audit_head.c.id == 1)).one()
    return Head(size=row.size, root=row.root, subtrees=split_hashes(row.frontier))


def _read_open(connection: Connection) -> list[OpenRequest]:
    query = (
        select(audit_leaves)
        .join(audit_open_requests, audit_open_requests.c.idx == audit_leaves.c.idx)
        .where(audit_open_requests.c.request_id == audit_leaves.c.request_id)
    )
    found = sorted((_leaf(row) for row in connection.execute(query)), key=lambda leaf: leaf.index)
    return [
        OpenRequest(request_id=leaf.request_id, gateway=gateway_of(leaf))
        for leaf in found
        if leaf.request_id is not None
    ]


def _latest_checkpoint(connection: Connection) -> StoredCheckpoint | None:
    query = select(audit_checkpoints).order_by(audit_checkpoints.c.size.desc()).limit(1)
    row = connection.execute(query).one_or_none()
    return StoredCheckpoint(size=row.size, note=row.note, time=row.time) if row else None


def read_leaves(connection: Connection, start: int, end: int, *, besides: Sequence[str] = ()) -> list[Leaf]:
    """Return the leaves of a range that exist, in order, without those of some types."""
    query = select(audit_leaves).where(audit_leaves.c.idx >= start, audit_leaves.c.idx < end)
    if besides:
        query = query.where(audit_leaves.c.type.not_in(besides))
    return [_leaf(row) for row in connection.execute(query.order_by(audit_leaves.c.idx))]


def _leaf(row: Row[Any]) -> Leaf:
    return Leaf(
        index=row.idx,
        leaf=_bytes(row.leaf),
        leaf_hash=_bytes(row.leaf_hash),
        type=row.type,
        request_id=row.request_id,
    )


def _bytes(value: bytes | str) -> bytes:
    """The value of a column; in SQLite it can be text if it was altered."""
    return value if isinstance(value, bytes) else str(value).encode()


def _read_writers(connection: Connection) -> dict[str, float]:
    return {row.gateway: row.seen_at for row in connection.execute(select(audit_writers))}
