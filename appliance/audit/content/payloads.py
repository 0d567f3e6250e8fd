"""
Where sealed content is kept: rows by request and part, outside the tree, that may be deleted.

A row is durable before the leaf that names it is written, so a row without a leaf is harmless, and a leaf
without its row is a finding unless an `erasure` entry accounts for it.  Synchronous: one thread of the
gateway calls it.  Fails closed: every database error is `AuditUnavailableError`.

A sample (`appliance.audit.content.samples`) is a further row of a request that no leaf names.  It exists only
as long as the request's content: erasing, rewrapping and destroying keys include it; counting, exporting and
showing content leave it out.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from appliance.audit.content.sealing import LOGGED, Part, Sealed
from appliance.audit.entry import new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.tables import audit_checkpoints, audit_head, audit_leaves, audit_payloads
from appliance.errors import AuditUnavailableError, ConfigurationError
from appliance.infra.database import SqlStore, first_line

CHUNK = 500
ULID_CHARACTERS = 26
_COLUMNS = audit_payloads.c
_IS_LOGGED = _COLUMNS.part.in_([part.value for part in LOGGED])
_IS_SAMPLE = _COLUMNS.part == Part.SAMPLE.value
_IS_INTENT = audit_leaves.c.type == EntryType.REQUEST_INTENT.value
_ENDS_REQUEST = audit_leaves.c.type.in_([each.value for each in EntryType if each.closes_request])
# The entry that names a payload; a sample goes with the body it was made of.
_NAMES_PART = case((_COLUMNS.part == Part.RESPONSE.value, _ENDS_REQUEST), else_=_IS_INTENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    request_id: str
    part: Part
    tenant: str
    key_id: str
    """Id of the tenant's key that wraps the data key now; the leaf names the first one."""
    sealed: Sealed
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Payloads of one tenant: of named requests, or all within the bounds; without bounds, all of them."""

    tenant: str
    requests: tuple[str, ...] = ()
    """Ids of requests; empty for all within the bounds."""
    before_ms: int | None = None
    """Milliseconds since the epoch; a request's own id says when it came, by its gateway's clock."""
    before_index: int | None = None
    """Only requests whose intent has a smaller index in the log, whatever the clocks said."""
    entry_index: int | None = None
    """Only payloads that an entry with a smaller index names; the entry of the erasure itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    payloads: int
    """Number in a selection, without samples."""
    requests: tuple[str, ...]
    """Named requests that have any."""
    key_ids: tuple[str, ...]
    """Keys that wrap them, samples included."""


class SqlPayloadStore(SqlStore):
    """Payloads in the audit log's database; each method that writes is one durable transaction."""

    subject = "content"
    unavailable = AuditUnavailableError

    def add(self, payloads: Sequence[Payload]) -> None:
        with self._transaction("kept") as connection:
            connection.execute(insert(audit_payloads), [row_of(payload) for payload in payloads])

    def get(self, request_id: str, part: Part) -> Payload | None:
        """Return one payload, or None: it was erased, or never kept."""
        query = select(audit_payloads).where(_COLUMNS.request_id == request_id, _COLUMNS.part == str(part))
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return _payload(row) if row is not None else None

    def count(self) -> int:
        """Return the number of payloads that `all` yields."""
        with self._reading() as connection:
            return connection.scalar(select(func.count()).select_from(audit_payloads).where(_IS_LOGGED)) or 0

    def all(self) -> Iterator[Payload]:
        """Yield all but samples, by request; each in a transaction of its own."""
        query = select(audit_payloads).where(_IS_LOGGED).order_by(_COLUMNS.request_id, _COLUMNS.part).limit(1)
        condition: ColumnElement[bool] | None = None
        while True:
            with self._reading() as connection:
                row = connection.execute(query if condition is None else query.where(condition)).one_or_none()
            if row is None:
                return
            yield _payload(row)
            condition = (_COLUMNS.request_id > row.request_id) | (
                (_COLUMNS.request_id == row.request_id) & (_COLUMNS.part > row.part)
            )

    def find(self, selection: Selection) -> Found:
        count, found, key_ids = 0, set[str](), set[str]()
        with self._reading() as connection:
            for condition in _conditions(selection):
                counted = select(func.count()).select_from(audit_payloads).where(condition, _IS_LOGGED)
                count += connection.scalar(counted) or 0
                key_ids |= set(connection.scalars(select(_COLUMNS.key_id).where(condition).distinct()))
                if selection.requests:
                    found |= set(connection.scalars(select(_COLUMNS.request_id).where(condition)))
        return Found(payloads=count, requests=tuple(sorted(found)), key_ids=tuple(sorted(key_ids)))

    def delete(self, selection: Selection) -> int:
        """Delete a selection; return the number of rows."""
        with self._transaction("erased", overwrites=True) as connection:
            # Samples are deleted after their sources.  On PostgreSQL a statement does not see rows that were
            # added while it waited for a lock: the first statement waits for a transaction that adds a
            # sample, the second sees the sample, and after the first no sample can be added.
            return sum(
                connection.execute(delete(audit_payloads).where(condition, of_part)).rowcount
                for condition in _conditions(selection)
                for of_part in (~_IS_SAMPLE, _IS_SAMPLE)
            )

    def wrapped_with(self, key_id: str) -> list[tuple[str, str, bytes]]:
        """Return request, part and wrapped data key of some payloads under a tenant's key."""
        query = select(_COLUMNS.request_id, _COLUMNS.part, _COLUMNS.wrapped_key)
        # A request's body before its sample: the order in which `add_sample` locks them.
        query = query.order_by(_COLUMNS.request_id, _COLUMNS.part).limit(CHUNK)
        with self._reading() as connection:
            rows = connection.execute(query.where(_COLUMNS.key_id == key_id)).all()
        return [(row.request_id, row.part, row.wrapped_key) for row in rows]

    def rewrap(self, rows: Iterable[tuple[str, str, bytes]], key_id: str) -> None:
        """Replace wrapped data keys by the same ones under another tenant's key."""
        change = update(audit_payloads).where(
            _COLUMNS.request_id == bindparam("of_request"), _COLUMNS.part == bindparam("of_part")
        )
        values = [
            {"of_request": request, "of_part": part, "wrapped_key": wrapped, "key_id": key_id}
            for request, part, wrapped in rows
        ]
        with self._transaction("rewrapped", overwrites=True) as connection:
            connection.execute(change, values)

    def scrub(self) -> None:
        """
        Have SQLite write deleted content out of its write-ahead log.

        PostgreSQL keeps deleted rows until it vacuums; no key decrypts them any more.
        """
        if self._is_postgresql:
            return
        try:
            with self._engine.connect() as connection:
                # Outside a transaction.  If a reader keeps it from finishing, later writes overwrite the log.
                driver = connection.connection.driver_connection
                assert driver is not None  # noqa: S101 - the connection is open
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except (SQLAlchemyError, sqlite3.Error) as error:
            message = f"erased content could not be scrubbed: {first_line(error)}"
            raise AuditUnavailableError(message) from error

    def unlogged(self, tenant: str, before_ms: int | None) -> tuple[str, ...]:
        """Return requests with a payload that no entry names: in flight, or refused once it was stored."""
        query = select(_COLUMNS.request_id).where(_COLUMNS.tenant == tenant, ~_IS_SAMPLE, ~_is_named())
        if before_ms is not None:
            query = query.where(_COLUMNS.request_id < first_id(before_ms))
        with self._reading() as connection:
            return tuple(sorted(set(connection.scalars(query))))

    def misdated(self, since_ms: int) -> dict[str, int]:
        """Return by tenant the number of payloads of requests whose ids are of this time or later."""
        query = select(_COLUMNS.tenant, func.count()).where(
            _COLUMNS.request_id >= first_id(since_ms), _IS_LOGGED
        )
        with self._reading() as connection:
            rows = connection.execute(query.group_by(_COLUMNS.tenant)).all()
        return {row[0]: row[1] for row in rows}

    def tenants_before(self, before_ms: int) -> list[str]:
        """Return the tenants that have payloads of requests that came before a time."""
        query = select(_COLUMNS.tenant).where(_COLUMNS.request_id < first_id(before_ms)).distinct()
        with self._reading() as connection:
            return sorted(connection.scalars(query))

    def size(self) -> int:
        """Return the number of entries in the log."""
        with self._reading() as connection:
            return connection.scalar(select(audit_head.c.size)) or 0

    def reached(self, start_ms: int, end_ms: int) -> int | None:
        """
        Return the smallest index among the requests that came first from a time on; None if there are none.

        The log had reached this time when it recorded that request, so a later entry with an older id was
        written by a clock that was behind.
        """
        query = (
            select(audit_leaves.c.idx)
            .where(
                audit_leaves.c.request_id >= first_id(start_ms),
                audit_leaves.c.request_id < first_id(max(start_ms, end_ms)),
                audit_leaves.c.type == EntryType.REQUEST_INTENT.value,
            )
            .order_by(audit_leaves.c.request_id)
            .limit(CHUNK)
        )
        with self._reading() as connection:
            return min(connection.scalars(query), default=None)

    def signed_size(self) -> int:
        """How many entries the newest checkpoint covers."""
        with self._reading() as connection:
            return connection.scalar(select(func.max(audit_checkpoints.c.size))) or 0

    def holds(self) -> dict[str, str]:
        """The tenants under a legal hold, and why; if the log cannot be read, nothing may be erased."""
        holds: dict[str, str] = {}
        for _, entry in self.entries(EntryType.HOLD_PLACED, EntryType.HOLD_RELEASED):
            if entry["type"] == EntryType.HOLD_PLACED:
                holds[entry["tenant"]] = entry["reason"]
            else:
                holds.pop(entry["tenant"], None)
        return holds

    def entries(self, *kinds: EntryType) -> list[tuple[int, dict[str, Any]]]:
        """Return index and members of every entry of kinds that belong to no request, in order."""
        # Only entries without a request: the index on request and type then finds them.
        query = select(audit_leaves.c.idx, audit_leaves.c.leaf).where(
            audit_leaves.c.request_id.is_(None), audit_leaves.c.type.in_([kind.value for kind in kinds])
        )
        with self._reading() as connection:
            rows = sorted(connection.execute(query).all(), key=lambda row: row.idx)
        return [(row.idx, json.loads(row.leaf)) for row in rows]

    def created_since(self, index: int) -> frozenset[str]:
        """Return the ULIDs of the files and batches that entries from an index on record as created."""
        return frozenset(
            (entry["file"] if entry["type"] == EntryType.FILE_CREATED else entry["batch"])[-ULID_CHARACTERS:]
            for at, entry in self.entries(EntryType.FILE_CREATED, EntryType.BATCH_CREATED)
            if at >= index
        )

    @contextmanager
    def _transaction(self, verb: str, *, overwrites: bool = False) -> Iterator[Connection]:
        with self._errors(verb), self._engine.begin() as connection:
            if overwrites and not self._is_postgresql:
                # Deleted content is overwritten in the file, not only unlinked from its pages.
                connection.exec_driver_sql("PRAGMA secure_delete = ON")
            yield connection
        # A crash before this line: rows that no leaf names, or a deletion that is done again.

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            with super()._errors(verb):
                yield
        except AuditUnavailableError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise AuditUnavailableError(
                    "the content of this request is kept already"
                ) from error.__cause__
            raise


def first_id(time_ms: int) -> str:
    """Return the smallest request id of a time: ids sort by time."""
    return new_entry_id(time_ms, bytes(10))


def _is_named(below: int | None = None, by: ColumnElement[bool] = _NAMES_PART) -> ColumnElement[bool]:
    """Whether an entry (with an index below a bound) names the payload; `by` says which entry is meant."""
    named = exists().where(audit_leaves.c.request_id == _COLUMNS.request_id, by)
    return named if below is None else named.where(audit_leaves.c.idx < below)


def _conditions(selection: Selection) -> Iterator[ColumnElement[bool]]:
    mine = _COLUMNS.tenant == selection.tenant
    if not selection.requests:
        bounded = [mine]
        if selection.before_ms is not None:
            bounded.append(_COLUMNS.request_id < first_id(selection.before_ms))
        if selection.before_index is not None:
            bounded.append(_is_named(selection.before_index, by=_IS_INTENT))
        if selection.entry_index is not None:
            bounded.append(_is_named(selection.entry_index))
        yield and_(*bounded)
    for start in range(0, len(selection.requests), CHUNK):
        yield and_(mine, _COLUMNS.request_id.in_(selection.requests[start : start + CHUNK]))


def row_of(payload: Payload) -> dict[str, Any]:
    return {
        "request_id": payload.request_id,
        "part": payload.part.value,
        "tenant": payload.tenant,
        "key_id": payload.key_id,
        "nonce": payload.sealed.nonce,
        "wrapped_key": payload.sealed.wrapped_key,
        "ciphertext": payload.sealed.ciphertext,
        "time": payload.time,
    }


def _payload(row: Any) -> Payload:  # noqa: ANN401 - a row of the table
    return Payload(
        request_id=row.request_id,
        part=Part(row.part),
        tenant=row.tenant,
        key_id=row.key_id,
        sealed=Sealed(nonce=row.nonce, ciphertext=row.ciphertext, wrapped_key=row.wrapped_key),
        time=row.time,
    )


def export_payloads(
    store: SqlPayloadStore,
    directory: Path,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> int:
    """
    Add kept content, still encrypted, to an export as `payloads/<request id>.<part>`; return its number.

    Call it after the log was exported: content is durable before the leaves that name it.  Raises
    AuditUnavailableError if content cannot be read, ConfigurationError if it cannot be written.  `progress`
    is called with the payloads written and their total.
    """
    count, total = 0, store.count()
    try:
        for payload in store.all():
            folder = directory / "payloads"
            folder.mkdir(exist_ok=True)
            (folder / f"{payload.request_id}.{payload.part}").write_bytes(payload.sealed.blob)
            count += 1
            progress(count, max(count, total))  # requests go on meanwhile
    except OSError as error:
        raise ConfigurationError(f"cannot write the export {directory}: {error.strerror}") from error
    return count
