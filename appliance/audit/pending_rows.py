"""
Accepted entries and the writers of a shared log, in PostgreSQL, in the transaction of the caller.

Locks, so that no two of them wait for each other: whoever accepts holds its row of `audit_writers` FOR KEY
SHARE, which does not conflict with noting what was integrated.  Whoever raises an epoch takes it FOR UPDATE:
it waits for entries that are being accepted, and none is accepted under the old epoch afterwards.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from sqlalchemy import Connection, select, text, update

from appliance.audit.entry_types import EntryType
from appliance.audit.integration import (
    FIRST_HASH,
    AcceptedRow,
    PendingRow,
    Plan,
    Position,
    plan_integration,
)
from appliance.audit.merkle import split_hashes
from appliance.audit.stored import Head, StoredCheckpoint
from appliance.audit.tables import audit_writers
from appliance.errors import AuditEntryError, AuditForkError, AuditRollbackError

INTEGRATION = "audit_integration"
"""Name of the lease."""
INTEGRATED_ROWS = 4096
"""Maximum rows of one gateway that come into the tree in one transaction, unless its requests are ended."""
_KINDS = {
    "seq": "bigint",
    "previous_hash": "bytea",
    "leaf": "bytea",
    "leaf_hash": "bytea",
    "type": "text",
    "request_id": "text",
}
assert list(_KINDS) == [field.name for field in fields(AcceptedRow)]  # noqa: S101
_ARRAYS = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in _KINDS.items())
_ENDS = ", ".join(f"'{kind.value}'" for kind in EntryType if kind.closes_request)
_INTENT = f"'{EntryType.REQUEST_INTENT.value}'"
# In one statement, so that the lock and the comparison come before the rows.
_ACCEPT = text(
    "WITH mine AS MATERIALIZED (SELECT epoch FROM audit_writers WHERE gateway = :gateway AND epoch = :epoch "  # noqa: S608 - names of ours
    f"FOR KEY SHARE) INSERT INTO audit_pending (gateway, epoch, {', '.join(_KINDS)}) "
    f"SELECT :gateway, mine.epoch, new.* FROM mine, unnest({_ARRAYS}) AS new"
)
# After the rows were inserted: an earlier row of the same request and type that another transaction moves
# meanwhile makes the insertion wait, and is in the tree for this statement.
_REFUSED = text(
    "SELECT new.request_id FROM unnest(CAST(:types AS text[]), CAST(:request_ids AS text[])) "  # noqa: S608 - names of ours
    "AS new (type, request_id) WHERE EXISTS (SELECT 1 FROM audit_leaves AS old "
    "WHERE old.request_id = new.request_id AND old.type = new.type) "
    f"OR new.type IN ({_ENDS}) AND (EXISTS (SELECT 1 FROM audit_pending AS ended "
    f"WHERE ended.request_id = new.request_id AND ended.type IN ({_ENDS}) AND ended.type <> new.type) "
    "OR NOT EXISTS (SELECT 1 FROM audit_pending AS begun "
    f"WHERE begun.request_id = new.request_id AND begun.type = {_INTENT}) "
    "AND NOT EXISTS (SELECT 1 FROM audit_open_requests AS open WHERE open.request_id = new.request_id))"
)
# By the index, from each gateway's position on: rows that were moved are left in the table until it is
# vacuumed, and must not be read again and again.
_NEXT = text(
    "SELECT next.* FROM audit_writers AS writer CROSS JOIN LATERAL ("
    "SELECT gateway, seq, epoch, previous_hash, leaf_hash, "
    "sha256(CAST('\\x00' AS bytea) || leaf) = leaf_hash AS sound FROM audit_pending AS pending "
    "WHERE pending.gateway = writer.gateway AND pending.seq > writer.integrated_seq "
    "ORDER BY pending.seq LIMIT CAST(:rows AS bigint)) AS next ORDER BY next.gateway, next.seq"
)
_WAIT = text(
    "SELECT EXISTS (SELECT 1 FROM audit_writers AS writer CROSS JOIN LATERAL ("
    "SELECT 1 FROM audit_pending AS pending "
    "WHERE pending.gateway = writer.gateway AND pending.seq > writer.integrated_seq "
    "ORDER BY pending.seq LIMIT 1) AS next)"
)
# The content goes from table to table without passing through the gateway.
_MOVE = text(
    "WITH moved AS (DELETE FROM audit_pending AS pending USING unnest(CAST(:gateways AS text[]), "
    "CAST(:firsts AS bigint[]), CAST(:lasts AS bigint[]), CAST(:places AS bigint[])) "
    "AS part (gateway, first, last, place) WHERE pending.gateway = part.gateway "
    "AND pending.seq BETWEEN part.first AND part.last "
    "RETURNING part.place + pending.seq - part.first, leaf, leaf_hash, type, request_id) "
    "INSERT INTO audit_leaves (idx, leaf, leaf_hash, type, request_id) SELECT * FROM moved"
)
_NOTE = text(
    "UPDATE audit_writers AS writer SET integrated_seq = part.seq, integrated_hash = part.hash FROM "
    "unnest(CAST(:gateways AS text[]), CAST(:lasts AS bigint[]), CAST(:hashes AS bytea[])) "
    "AS part (gateway, seq, hash) WHERE writer.gateway = part.gateway"
)
_MINE = text(
    "SELECT pending.seq, pending.epoch, pending.previous_hash, pending.leaf_hash, pending.type, "
    "pending.request_id, sha256(CAST('\\x00' AS bytea) || leaf) = leaf_hash AS sound "
    "FROM audit_pending AS pending JOIN audit_writers AS writer USING (gateway) "
    "WHERE pending.gateway = :gateway AND pending.seq > writer.integrated_seq ORDER BY pending.seq"
)
_MY_HASHES = text(
    "SELECT string_agg(sha256(CAST('\\x00' AS bytea) || pending.leaf), CAST('' AS bytea) "
    "ORDER BY pending.seq) "
    "FROM audit_pending AS pending JOIN audit_writers AS writer USING (gateway) "
    "WHERE pending.gateway = :gateway AND pending.seq > writer.integrated_seq"
)
_TREE_HASHES = text(
    "SELECT string_agg(leaf_hash, CAST('' AS bytea) ORDER BY idx) FROM audit_leaves "
    "WHERE idx >= :start AND idx < :end"
)
_REGISTER = text(
    "INSERT INTO audit_writers (gateway, seen_at, epoch, instance) VALUES (:gateway, :now, 1, :instance) "
    "ON CONFLICT (gateway) DO UPDATE "
    "SET seen_at = :now, epoch = audit_writers.epoch + 1, instance = :instance "
    "RETURNING epoch, integrated_seq, integrated_hash"
)
_REGISTER_AGAIN = text(
    "UPDATE audit_writers SET seen_at = :now, epoch = epoch + 1 "
    "WHERE gateway = :gateway AND instance = :instance RETURNING epoch, integrated_seq, integrated_hash"
)
_FREE_LEASE = text(
    "UPDATE control_lease SET holder = '' WHERE name = :name AND holder <> :holder "
    "AND starts_with(holder, :gateway || '/')"
)
FENCE = (
    "EXISTS (SELECT 1 FROM control_lease "
    "WHERE name = :lease AND holder = :holder AND epoch = :lease_epoch) "
    "AND EXISTS (SELECT 1 FROM audit_writers WHERE gateway = :gateway AND epoch = :epoch)"
)
_HELD = text(f"SELECT 1 WHERE {FENCE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Under which name and start a gateway writes a shared log."""

    gateway: str
    instance: str
    epoch: int = 0

    @property
    def holder(self) -> str:
        """Of the lease: every start has another, so an older process of the same name holds nothing."""
        return f"{self.gateway}/{self.instance}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """What must still be so when a gateway moves the head."""

    writing: Writing
    lease_epoch: int

    def parameters(self) -> dict[str, object]:
        return {
            "lease": INTEGRATION,
            "holder": self.writing.holder,
            "lease_epoch": self.lease_epoch,
            "gateway": self.writing.gateway,
            "epoch": self.writing.epoch,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    writing: Writing
    end: Position
    """Of this gateway's sequence, with what is pending."""
    pending: tuple[bytes, ...]
    """Hashes of this gateway's entries that are not in the tree."""
    entries: tuple[tuple[str, str | None], ...]
    """Type and request of each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The log as others see it; what is pending was read before the tree."""

    writing: Writing | None
    """Under which start this gateway may write; None after another declared it dead."""
    pending: frozenset[bytes]
    checkpoint: StoredCheckpoint | None
    head: Head
    leaf_hashes: tuple[bytes, ...]


Integrate = Callable[[Head, Sequence[bytes], Plan], Head]
"""Given the head, the hashes others added, and what can be integrated: the head with it, or an error."""


def register(connection: Connection, writing: Writing, now: float, *, again: bool) -> Registered:
    """Raise the gateway's epoch: nothing that an earlier start has sent can be written any more."""
    parameters = {"gateway": writing.gateway, "now": now, "instance": writing.instance}
    row = connection.execute(_REGISTER_AGAIN if again else _REGISTER, parameters).one_or_none()
    if row is None:
        raise replaced(writing.gateway)
    freed = {"name": INTEGRATION, "gateway": writing.gateway, "holder": writing.holder}
    connection.execute(_FREE_LEASE, freed)
    start = Position(seq=row.integrated_seq, leaf_hash=row.integrated_hash or FIRST_HASH)
    found = connection.execute(_MINE, {"gateway": writing.gateway}).all()
    rows = [
        PendingRow(
            gateway=writing.gateway,
            seq=each.seq,
            epoch=each.epoch,
            previous_hash=each.previous_hash,
            leaf_hash=each.leaf_hash,
            sound=each.sound,
        )
        for each in found
    ]
    for why in plan_integration({writing.gateway: start}, rows).broken.values():
        raise AuditRollbackError(
            f"entries that this gateway accepted were removed or changed on their way into the log: {why}; "
            "do not delete anything, and compare the database with a backup"
        )
    return Registered(
        writing=Writing(gateway=writing.gateway, instance=writing.instance, epoch=row.epoch),
        end=Position(seq=rows[-1].seq, leaf_hash=rows[-1].leaf_hash) if rows else start,
        pending=tuple(each.leaf_hash for each in rows),
        entries=tuple((each.type, each.request_id) for each in found),
    )


def accept(connection: Connection, writing: Writing, rows: Sequence[AcceptedRow]) -> None:
    """
    Insert the entries; raises AuditEntryError if a request began or ended already, or ends without an intent.

    Raises AuditForkError if the gateway was declared dead, or has another process.
    """
    columns = {name: [getattr(row, name) for row in rows] for name in _KINDS}
    added = connection.execute(
        _ACCEPT, {"gateway": writing.gateway, "epoch": writing.epoch, **columns}
    ).rowcount
    if added != len(rows):
        raise replaced(writing.gateway)
    of_requests = [row for row in rows if row.request_id is not None]
    if not of_requests:
        return
    given = {
        "types": [row.type for row in of_requests],
        "request_ids": [row.request_id for row in of_requests],
    }
    refused = connection.execute(_REFUSED, given).scalars().first()
    if refused is not None:
        raise AuditEntryError(
            f"request {refused} begins or ends twice in the log, or ends without an intent: it was refused"
        )


def is_held(connection: Connection, fence: Fence) -> bool:
    return connection.scalar(_HELD, fence.parameters()) is not None


def is_waiting(connection: Connection) -> bool:
    return bool(connection.scalar(_WAIT))


def next_rows(connection: Connection, most: int | None) -> Plan:
    """Read what can be integrated now, at most so many rows of each gateway; None for all."""
    writers = connection.execute(select(audit_writers)).all()
    positions = {
        row.gateway: Position(seq=row.integrated_seq, leaf_hash=row.integrated_hash or FIRST_HASH)
        for row in writers
    }
    final = {row.gateway for row in writers if not row.instance}
    rows = [
        PendingRow(
            gateway=row.gateway,
            seq=row.seq,
            epoch=row.epoch,
            previous_hash=row.previous_hash,
            leaf_hash=row.leaf_hash,
            sound=row.sound,
        )
        for row in connection.execute(_NEXT, {"rows": most})
    ]
    return plan_integration(positions, rows, final)


def move(connection: Connection, plan: Plan, size: int) -> None:
    """Move the rows behind the first `size` leaves, and note how far each gateway's are."""
    places, at = [], size
    for prefix in plan.prefixes:
        places.append(at)
        at += len(prefix.rows)
    parts = {
        "gateways": [prefix.gateway for prefix in plan.prefixes],
        "firsts": [prefix.first for prefix in plan.prefixes],
        "lasts": [prefix.last.seq for prefix in plan.prefixes],
        "places": places,
    }
    if connection.execute(_MOVE, parts).rowcount != at - size:
        raise AuditForkError("accepted audit entries disappeared while they were integrated")
    reached = {
        "gateways": list(plan.ends),
        "lasts": [end.seq for end in plan.ends.values()],
        "hashes": [end.leaf_hash for end in plan.ends.values()],
    }
    connection.execute(_NOTE, reached)


def declare_dead(connection: Connection, gateways: Iterable[str], silent_since: float) -> list[str]:
    """Raise the epochs of those that are still silent, once what they are accepting is complete."""
    query = (
        select(audit_writers.c.gateway)
        .where(audit_writers.c.gateway.in_(list(gateways)), audit_writers.c.seen_at < silent_since)
        .order_by(audit_writers.c.gateway)
    )
    dead = list(connection.execute(query.with_for_update()).scalars())
    if dead:
        connection.execute(
            update(audit_writers)
            .where(audit_writers.c.gateway.in_(dead))
            .values(epoch=audit_writers.c.epoch + 1, instance="")
        )
    return dead


def read_own(connection: Connection, gateway: str) -> tuple[Writing | None, frozenset[bytes]]:
    """Return under which start the gateway may write, and the hashes of the leaves that wait."""
    row = connection.execute(select(audit_writers).where(audit_writers.c.gateway == gateway)).one_or_none()
    hashes = connection.scalar(_MY_HASHES, {"gateway": gateway}) or b""
    writing = None if row is None else Writing(gateway=row.gateway, instance=row.instance, epoch=row.epoch)
    return writing, frozenset(split_hashes(hashes))


def tree_hashes(connection: Connection, start: int, end: int, step: int) -> tuple[bytes, ...]:
    """Return the hashes of the leaves from `start` to `end` that exist."""
    found: list[bytes] = []
    for at in range(start, end, step):
        piece = connection.scalar(_TREE_HASHES, {"start": at, "end": min(at + step, end)})
        found += split_hashes(piece or b"")
    return tuple(found)


def replaced(gateway: str) -> AuditForkError:
    return AuditForkError(
        f"another writer has started under this gateway's name, {gateway}, or has declared it dead and ended "
        "its requests: start this gateway again, and give each gateway a data directory or an audit.gateway "
        "of its own"
    )
