"""
Time stamps of the log, kept in its database: insert-only, one for a tree size.

A row is evidence, not state: without it the log continues, and is timed by the others.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from appliance.audit.checkpoint import parse_body, parse_note
from appliance.audit.tables import audit_checkpoints, audit_timestamps
from appliance.errors import AuditUnavailableError, AuditVerificationError
from appliance.infra.database import SqlStore

CHUNK = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestamp:
    """A time stamp over the checkpoint of `size` entries."""

    size: int
    token: bytes
    """The authority's whole answer, a TimeStampResp."""
    time: int
    """When, in seconds since the epoch, by the authority's clock."""


class Timestamps(SqlStore):
    subject = "time stamps"
    unavailable = AuditUnavailableError

    def save(self, timestamp: Timestamp) -> None:
        """Keep a time stamp, unless there is one of its size; raises AuditUnavailableError."""
        row = {"size": timestamp.size, "token": timestamp.token, "time": timestamp.time}
        try:
            with self._writing() as connection:
                connection.execute(insert(audit_timestamps).values(row))
            # A crash before this line: it is kept whole, or not at all and asked for again.
        except AuditUnavailableError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise  # else another gateway was first

    def newest(self) -> Timestamp | None:
        query = select(audit_timestamps).order_by(audit_timestamps.c.size.desc()).limit(1)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return Timestamp(size=row.size, token=row.token, time=row.time) if row else None

    def all(self) -> Iterator[Timestamp]:
        """Yield every time stamp, the smallest first; raises AuditUnavailableError."""
        after = -1
        while True:
            query = select(audit_timestamps).where(audit_timestamps.c.size > after)
            with self._reading() as connection:
                rows = connection.execute(query.order_by(audit_timestamps.c.size).limit(CHUNK)).all()
            yield from (Timestamp(size=row.size, token=row.token, time=row.time) for row in rows)
            if len(rows) < CHUNK:
                return
            after = rows[-1].size

    def checkpoint_of(self, imprint: bytes) -> str:
        """
        Return the text of the checkpoint with this SHA-256, searching from the newest.

        Raises AuditVerificationError if this log has none, and AuditUnavailableError.
        """
        query = select(audit_checkpoints.c.size, audit_checkpoints.c.note)
        query = query.order_by(audit_checkpoints.c.size.desc()).limit(CHUNK)
        before: int | None = None
        while True:
            page = query if before is None else query.where(audit_checkpoints.c.size < before)
            with self._reading() as connection:
                rows = connection.execute(page).all()
            for row in rows:
                text = parse_note(row.note).text
                if hashlib.sha256(text.encode()).digest() == imprint and parse_body(text).size == row.size:
                    return text
            if len(rows) < CHUNK:
                raise AuditVerificationError("the time stamp is of no checkpoint of this log")
            before = rows[-1].size
