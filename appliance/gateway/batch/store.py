"""
Rows of files and batches in the audit log's database, shared by all gateways.

Synchronous: callers use a thread.  Fails closed: every database error is `StorageUnavailableError`.
Every change by a client is one conditional statement, so two gateways cannot both apply it.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, insert, select, text, update

from appliance.errors import StorageQuotaError, StorageUnavailableError
from appliance.gateway.batch.batch import (
    ENDED,
    OPEN,
    Batch,
    BatchProblem,
    Counts,
    Deleted,
    FilePurpose,
    Status,
    StoredFile,
    before,
)
from appliance.gateway.batch.tables import batch_files, batches
from appliance.infra.database import SqlStore

_FILE, _BATCH = batch_files.c, batches.c
UPLOADING = str(Deleted.REFUSED)
"""In `deleted`: the row is the reservation of an upload in flight.  A value that 0.1.0 knows: if an operator
goes back to it after a crash, it removes row and bytes like those of any hidden file."""
_MOMENTS = tuple(status for status in Status if status is not Status.VALIDATING)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageQuota:
    files: int
    size: int  # bytes in total


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    limit: int
    after: str | None = None  # id after which it begins; None for the start of the list
    ascending: bool = False  # oldest first; otherwise newest first


class SqlBatchStore(SqlStore):
    """The tables are there already; raises ConfigurationError if the URL cannot be used."""

    subject = "files and batches"
    unavailable = StorageUnavailableError

    # Files.

    def reserve_file(self, reserved: StoredFile, quota: StorageQuota) -> None:
        """Count an upload that begins as a file of its reserved size; raises StorageQuotaError."""
        with self._writing() as connection:
            _lock_tenant(connection, reserved.tenant)
            count, size = _usage(connection, reserved.tenant)
            _refuse_over(quota, count + 1, size + reserved.size)
            connection.execute(insert(batch_files).values(_file_row(reserved) | {"deleted": UPLOADING}))

    def add_file(self, stored: StoredFile) -> bool:
        """Make a reservation the row of a file whose bytes are durable; False if it is gone."""
        made = update(batch_files).where(_FILE.id == stored.file_id, _FILE.deleted == UPLOADING)
        with self._writing() as connection:
            return connection.execute(made.values(_file_row(stored) | {"deleted": None})).rowcount > 0

    def reservations(self, gateway: str) -> list[StoredFile]:
        query = select(batch_files).where(_FILE.gateway == gateway, _FILE.deleted == UPLOADING)
        with self._reading() as connection:
            return [_file(row) for row in connection.execute(query)]

    def forget_reservation(self, file_id: str) -> None:
        with self._writing() as connection:
            connection.execute(delete(batch_files).where(_FILE.id == file_id, _FILE.deleted == UPLOADING))

    def expire_reservations(self, now: int) -> None:
        """Forget reservations of every gateway whose time is over: it ended, and has not started again."""
        with self._writing() as connection:
            connection.execute(delete(batch_files).where(_FILE.deleted == UPLOADING, _FILE.expires_at <= now))

    def check_quota(self, tenant: str, quota: StorageQuota, *, more_files: int, more_bytes: int) -> None:
        """Raise StorageQuotaError if the tenant's storage, with so much more, exceeds the quota."""
        with self._reading() as connection:
            count, size = _usage(connection, tenant)
        _refuse_over(quota, count + more_files, size + more_bytes)

    def stored_ids(self) -> set[str]:
        """Ids of all tenants' stored files, and of batches that have not ended: their keys may be in use."""
        with self._reading() as connection:
            open_batches = connection.scalars(select(_BATCH.id).where(_BATCH.status.in_(OPEN)))
            return {*connection.scalars(select(_FILE.id)), *open_batches}

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        query = select(batch_files).where(
            _FILE.id == file_id, _FILE.tenant == tenant, _FILE.deleted.is_(None)
        )
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return _file(row) if row is not None else None

    def files(self, tenant: str, window: Window, purpose: str | None = None) -> list[StoredFile]:
        """One more than the window's limit if there are more."""
        query = select(batch_files).where(_FILE.tenant == tenant, _FILE.deleted.is_(None))
        if purpose is not None:
            query = query.where(_FILE.purpose == purpose)
        with self._reading() as connection:
            return [_file(row) for row in connection.execute(_within(query, _FILE.id, window))]

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Hide a file unless an open batch reads it; returns whether it was hidden."""
        return self._hide(Deleted.DELETED, _FILE.tenant == tenant, _FILE.id == file_id, _is_free())

    def expire_files(self, gateway: str, now: int) -> None:
        """Hide the gateway's expired files that no open batch reads."""
        self._hide(Deleted.EXPIRED, _FILE.gateway == gateway, _FILE.expires_at <= now, _is_free())

    def hide_file(self, file_id: str, why: Deleted) -> None:
        """Even if an open batch reads it."""
        self._hide(why, _FILE.id == file_id)

    def erase_files(self, tenant: str, before_s: int | None) -> int:
        """
        Hide all files of a tenant, even if read, and delete its ended batches.

        With a time, those created before it; without, all of them, whatever the clocks said.  Batches that
        have not ended lose what the client said of them, and end without their input.
        """
        hidden = update(batch_files).where(_FILE.tenant == tenant, _FILE.deleted.is_(None))
        forget = delete(batches).where(_BATCH.tenant == tenant, _BATCH.status.in_(ENDED))
        blank = update(batches).where(_BATCH.tenant == tenant).values(metadata="{}")
        if before_s is not None:
            hidden = hidden.where(_FILE.created_at < before_s)
            forget = forget.where(_BATCH.created_at < before_s)
            blank = blank.where(_BATCH.created_at < before_s)
        with self._writing() as connection:
            connection.execute(forget)
            connection.execute(blank)
            return connection.execute(hidden.values(deleted=str(Deleted.ERASED))).rowcount

    def hidden_files(self, gateway: str) -> list[tuple[StoredFile, Deleted]]:
        """The gateway's hidden files, and why they are hidden."""
        query = select(batch_files).where(_FILE.gateway == gateway, _FILE.deleted != UPLOADING)
        with self._reading() as connection:
            return [(_file(row), Deleted(row.deleted)) for row in connection.execute(query)]

    def sealed_files(self, gateway: str) -> list[StoredFile]:
        query = select(batch_files).where(
            _FILE.gateway == gateway, _FILE.sealed.is_(True), _FILE.deleted.is_(None)
        )
        with self._reading() as connection:
            return [_file(row) for row in connection.execute(query)]

    def forget_file(self, file_id: str) -> None:
        """Delete the row of a file whose bytes were removed."""
        with self._writing() as connection:
            connection.execute(delete(batch_files).where(_FILE.id == file_id))

    def known(self, gateway: str) -> tuple[frozenset[str], frozenset[str]]:
        """Ids of all files of a gateway, without uploads in flight, and of all its ended batches."""
        is_file = _FILE.deleted.is_distinct_from(UPLOADING)
        files = select(_FILE.id).where(_FILE.gateway == gateway, is_file)
        ended = select(_BATCH.id).where(_BATCH.gateway == gateway, _BATCH.status.in_(ENDED))
        with self._reading() as connection:
            return frozenset(connection.scalars(files)), frozenset(connection.scalars(ended))

    # Batches.

    def add_batch(self, batch: Batch, most_open: int) -> None:
        """Raises StorageQuotaError if the tenant has reached its maximum of open batches."""
        counting = select(func.count()).where(_BATCH.tenant == batch.tenant, _BATCH.status.in_(OPEN))
        with self._writing() as connection:
            _lock_tenant(connection, batch.tenant)
            if (connection.scalar(counting) or 0) >= most_open:
                message = (
                    f"This tenant has {most_open} batches that have not ended: wait for one, or cancel it."
                )
                raise StorageQuotaError(message)
            connection.execute(insert(batches).values(_batch_row(batch)))

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        query = select(batches).where(_BATCH.id == batch_id, _BATCH.tenant == tenant)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return _batch(row) if row is not None else None

    def batches(self, tenant: str, window: Window) -> list[Batch]:
        """One more than the window's limit if there are more."""
        query = _within(select(batches).where(_BATCH.tenant == tenant), _BATCH.id, window)
        with self._reading() as connection:
            return [_batch(row) for row in connection.execute(query)]

    def open_batches(self, gateway: str) -> list[Batch]:
        """Oldest first."""
        query = select(batches).where(_BATCH.gateway == gateway, _BATCH.status.in_(OPEN)).order_by(_BATCH.id)
        with self._reading() as connection:
            return [_batch(row) for row in connection.execute(query)]

    def move(
        self,
        batch_id: str,
        status: Status,
        now: int,
        *,
        outputs: Collection[StoredFile] = (),
        **values: Any,  # noqa: ANN401 - columns of the table
    ) -> bool:
        """
        Change a batch's state if its current state allows it; returns whether it did.

        `outputs` are files to insert in the same transaction, regardless of the quota; if there are any, the
        batch's input must not be hidden: results of erased content are not kept.  `values` are other columns.
        """
        changes = {"status": str(status), f"{status}_at": now, **values}
        moved = update(batches).where(_BATCH.id == batch_id, _BATCH.status.in_(before(status)))
        if outputs:
            source = select(_FILE.id).where(_FILE.id == _BATCH.input_file_id, _FILE.deleted.is_(None))
            moved = moved.where(source.exists())
        with self._writing() as connection:
            if not connection.execute(moved.values(changes)).rowcount:
                return False
            for stored in outputs:
                connection.execute(insert(batch_files).values(_file_row(stored)))
            return True

    def progress(self, batch_id: str, counts: Counts) -> None:
        """For display; the journal is authoritative."""
        values = {"completed": counts.completed, "failed": counts.failed}
        with self._writing() as connection:
            connection.execute(update(batches).where(_BATCH.id == batch_id).values(values))

    def _hide(self, why: Deleted, *which: ColumnElement[bool]) -> bool:
        statement = update(batch_files).where(_FILE.deleted.is_(None), *which).values(deleted=str(why))
        with self._writing() as connection:
            return connection.execute(statement).rowcount > 0


def _within(query: Select[Any], column: ColumnElement[str], window: Window) -> Select[Any]:
    if window.after is not None:
        query = query.where(column > window.after if window.ascending else column < window.after)
    return query.order_by(column if window.ascending else column.desc()).limit(window.limit + 1)


def _is_free() -> ColumnElement[bool]:
    return ~_FILE.id.in_(select(_BATCH.input_file_id).where(_BATCH.status.in_(OPEN)))


def _lock_tenant(connection: Connection, tenant: str) -> None:
    """Until the transaction ends, no other counts and adds for this tenant; SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        lock = text("SELECT pg_advisory_xact_lock(hashtext(:name))")
        connection.execute(lock, {"name": f"batch_files/{tenant}"})


def _usage(connection: Connection, tenant: str) -> tuple[int, int]:
    """Number and bytes of a tenant's files, including hidden ones and reservations of uploads."""
    query = select(func.count(), func.coalesce(func.sum(_FILE.bytes), 0)).where(_FILE.tenant == tenant)
    count, size = connection.execute(query).one()
    return int(count), int(size)


def _refuse_over(quota: StorageQuota, files: int, size: int) -> None:
    if files > quota.files:
        raise StorageQuotaError(f"This tenant may keep {quota.files} files: delete some first.")
    if size > quota.size:
        raise StorageQuotaError(f"This tenant may keep {quota.size} bytes of files: delete some first.")


def _file_row(stored: StoredFile) -> dict[str, Any]:
    return {
        "id": stored.file_id,
        "tenant": stored.tenant,
        "gateway": stored.gateway,
        "filename": stored.filename,
        "purpose": str(stored.purpose),
        "bytes": stored.size,
        "sealed": stored.sealed,
        "created_at": stored.created_at,
        "expires_at": stored.expires_at,
    }


def _file(row: Any) -> StoredFile:  # noqa: ANN401 - a row of the table
    return StoredFile(
        file_id=row.id,
        tenant=row.tenant,
        gateway=row.gateway,
        filename=row.filename,
        purpose=FilePurpose(row.purpose),
        size=row.bytes,
        sealed=row.sealed,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


def _batch_row(batch: Batch) -> dict[str, Any]:
    return {
        "id": batch.batch_id,
        "tenant": batch.tenant,
        "key_id": batch.key_id,
        "gateway": batch.gateway,
        "client": batch.client,
        "endpoint": batch.endpoint,
        "completion_window": batch.completion_window,
        "input_file_id": batch.input_file_id,
        "sealed": batch.sealed,
        "status": str(batch.status),
        "metadata": json.dumps(dict(batch.metadata)),
        "errors": encode_problems(batch.errors),
        "output_seconds": batch.output_seconds,
        "total": batch.counts.total,
        "completed": batch.counts.completed,
        "failed": batch.counts.failed,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
    }


def _batch(row: Any) -> Batch:  # noqa: ANN401 - a row of the table
    moments: Mapping[Status, int | None] = {status: getattr(row, f"{status}_at") for status in _MOMENTS}
    return Batch(
        batch_id=row.id,
        tenant=row.tenant,
        key_id=row.key_id,
        gateway=row.gateway,
        client=row.client,
        endpoint=row.endpoint,
        completion_window=row.completion_window,
        input_file_id=row.input_file_id,
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        sealed=row.sealed,
        status=Status(row.status),
        model=row.model,
        metadata=json.loads(row.metadata),
        errors=tuple(BatchProblem(**problem) for problem in json.loads(row.errors)),
        output_seconds=row.output_seconds,
        counts=Counts(total=row.total, completed=row.completed, failed=row.failed),
        created_at=row.created_at,
        expires_at=row.expires_at,
        moments={status: moment for status, moment in moments.items() if moment is not None},
    )


def encode_problems(problems: Collection[BatchProblem]) -> str:
    return json.dumps([asdict(problem) for problem in problems])
