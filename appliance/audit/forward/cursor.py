"""
How much of the log a destination has, and the checkpoints that are due; in the log's own database.

A row says where sending resumes.  It moves only behind what was sent, so a crash or a failed write at any
point sends entries again and skips none.
"""

from dataclasses import dataclass

from sqlalchemy import insert, select, update

from appliance.audit.merkle import HASH_BYTES, CompactRange
from appliance.audit.stored import StoredCheckpoint
from appliance.audit.tables import audit_checkpoints, audit_forwarding
from appliance.errors import AuditUnavailableError
from appliance.infra.database import SqlStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    size: int = 0
    """Entries below are known to be received; it is the size of a checkpoint, or 0."""
    subtrees: tuple[bytes, ...] = ()
    """Of the tree at that size."""
    sent: int = 0
    """Entries sent at least once."""

    @property
    def tree(self) -> CompactRange:
        """Raises AuditVerificationError if the row was altered and makes no tree."""
        return CompactRange(self.size, self.subtrees)


class ForwardStore(SqlStore):
    """Every method may raise AuditUnavailableError, and blocks."""

    subject = "the state of forwarding"
    unavailable = AuditUnavailableError

    def load(self, destination: str) -> Cursor:
        query = select(audit_forwarding).where(audit_forwarding.c.destination == destination)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return Cursor()
        nodes = (row.frontier[at : at + HASH_BYTES] for at in range(0, len(row.frontier), HASH_BYTES))
        return Cursor(size=row.size, subtrees=tuple(nodes), sent=row.sent)

    def save(self, destination: str, cursor: Cursor) -> None:
        """Move a destination's cursor; another gateway that has moved it further keeps its place."""
        mine = audit_forwarding.c.destination == destination
        row = {"size": cursor.size, "frontier": b"".join(cursor.subtrees), "sent": cursor.sent}
        with self._writing() as connection:
            if connection.scalar(select(audit_forwarding.c.destination).where(mine)) is None:
                connection.execute(insert(audit_forwarding).values(destination=destination, **row))
            else:
                ahead = audit_forwarding.c.size <= cursor.size
                connection.execute(update(audit_forwarding).where(mine, ahead).values(**row))

    def checkpoints(self, size: int, limit: int) -> list[StoredCheckpoint]:
        """The next checkpoints that cover more than `size` entries, smallest first."""
        query = select(audit_checkpoints).where(audit_checkpoints.c.size > size)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(audit_checkpoints.c.size).limit(limit)).all()
        return [StoredCheckpoint(size=row.size, note=row.note, time=row.time) for row in rows]

    def checkpoint(self, size: int) -> StoredCheckpoint | None:
        query = select(audit_checkpoints).where(audit_checkpoints.c.size == size)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return StoredCheckpoint(size=row.size, note=row.note, time=row.time) if row else None
