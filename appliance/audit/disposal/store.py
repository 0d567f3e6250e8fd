"""
Disposes of entries in the database, tile by tile.

    `audit.disposed` durable, signed, cosigned ─► paths of the leaves that stay in `audit_kept`
        ─► row in `audit_disposal` ─► the other leaves deleted

A crash anywhere leaves a log that works and verifies: until the row is there nothing is gone, and from then
on a tile is either whole or has its paths only.  Run again, it completes what is left.  Fails closed: a tile
that is not the one of the tree is not deleted, because it is evidence.

On PostgreSQL the role that owns the tables is needed: gateways have no DELETE on leaves.
"""

from collections.abc import Iterator, MutableSet, Sequence

from sqlalchemy import Connection, delete, exists, func, insert, select

from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import TILE_WIDTH, hash_leaf, path_in_tile, root_from_leaf_hashes
from appliance.audit.store import read_disposal, read_leaves, tiles_of
from appliance.audit.stored import Disposal, Leaf, place_of
from appliance.audit.tables import (
    audit_disposal,
    audit_kept,
    audit_leaves,
    audit_open_requests,
    audit_payloads,
)
from appliance.errors import AuditUnavailableError, AuditVerificationError
from appliance.infra.database import SqlStore

TILES = 16
"""Disposed of in one transaction: some milliseconds, during which nothing else is written to SQLite."""
_INTENT = EntryType.REQUEST_INTENT.value
_ENDS = [each.value for each in EntryType if each.closes_request]
_OUTLIVE = [each.value for each in EntryType if each.outlives_disposal]
_NAMES = 500
_IS_KEPT = exists().where(audit_kept.c.idx == audit_leaves.c.idx)


class DisposalStore(SqlStore):
    """Every method blocks, and may raise AuditUnavailableError."""

    subject = "disposal"
    unavailable = AuditUnavailableError

    def open_from(self) -> int | None:
        """Return the intent of the oldest request without an end."""
        with self._reading() as connection:
            return connection.execute(select(func.min(audit_open_requests.c.idx))).scalar_one_or_none()

    def content_from(self) -> int | None:
        """Return the intent of the oldest request whose content is stored."""
        intent = (audit_leaves.c.request_id == audit_payloads.c.request_id) & (audit_leaves.c.type == _INTENT)
        query = select(func.min(audit_leaves.c.idx)).select_from(audit_payloads.join(audit_leaves, intent))
        with self._reading() as connection:
            return connection.execute(query).scalar_one_or_none()

    def is_complete(self, disposal: Disposal) -> bool:
        """Whether a disposal is known, and all that it disposes of is gone."""
        with self._reading() as connection:
            known = read_disposal(connection).below
            return known >= disposal.below and _first_left(connection, 0, known) is None

    def keep(self, below: int) -> Iterator[int]:
        """Write the paths of the leaves that will stay; yield how far it is done, after every transaction."""
        with self._reading() as connection:
            first = read_disposal(connection).below // TILE_WIDTH
        # From the newest tile on: the first entry that is met of a gateway's sequence is the newest.
        left, met = below // TILE_WIDTH, set[str]()
        while left > first:
            with self._writing() as connection:
                for number in range(left - 1, max(first, left - TILES) - 1, -1):
                    _keep_of_tile(connection, number, below, met)
                    left = number
            yield below - (left - first) * TILE_WIDTH

    def begin(self, disposal: Disposal) -> None:
        """Make a disposal known of which the paths are kept: from now on its leaves may go."""
        with self._writing() as connection:
            if read_disposal(connection).below < disposal.below:
                connection.execute(delete(audit_disposal))
                row = {"id": 1, "below": disposal.below, "idx": disposal.index}
                connection.execute(insert(audit_disposal).values(row))
        # A crash before this line: readers expect no leaf below, and find them still.

    def run(self) -> Iterator[int]:
        """Delete what is disposed of and still there; yield how far it is done, after every transaction."""
        done = 0
        with self._reading() as connection:
            below = read_disposal(connection).below
        while done < below:
            with self._writing() as connection:
                self._overwrite(connection)
                done = _delete_from(connection, done, below)
                if done == below:
                    _drop_superseded(connection, below)
            yield done

    def _overwrite(self, connection: Connection) -> None:
        if not self._is_postgresql:
            # Deleted entries are overwritten in the file, not only unlinked from its pages.
            connection.exec_driver_sql("PRAGMA secure_delete = ON")


def _delete_from(connection: Connection, done: int, below: int) -> int:
    """Delete the leaves of the next few tiles that are there; return how far it is done."""
    for _ in range(TILES):
        first = _first_left(connection, done, below)
        if first is None:
            return below
        number = first // TILE_WIDTH
        start, done = number * TILE_WIDTH, (number + 1) * TILE_WIDTH
        _read_tile(connection, number)
        gone = delete(audit_leaves).where(audit_leaves.c.idx >= start, audit_leaves.c.idx < done, ~_IS_KEPT)
        connection.execute(gone)
    return done


def _first_left(connection: Connection, start: int, below: int) -> int | None:
    query = select(audit_leaves.c.idx).where(
        audit_leaves.c.idx >= start, audit_leaves.c.idx < below, ~_IS_KEPT
    )
    return connection.execute(query.order_by(audit_leaves.c.idx).limit(1)).scalar_one_or_none()


def _keep_of_tile(connection: Connection, number: int, below: int, met: MutableSet[str]) -> None:
    start = number * TILE_WIDTH
    leaves = _read_tile(connection, number)
    hashes = [leaf.leaf_hash for leaf in leaves]
    paths = [
        {"idx": leaf.index, "path": b"".join(path_in_tile(hashes, leaf.index - start))}
        for leaf in _needed(connection, leaves, below, met)
    ]
    # Those of a run that was interrupted are written again.
    connection.execute(delete(audit_kept).where(audit_kept.c.idx.between(start, start + TILE_WIDTH - 1)))
    if paths:
        connection.execute(insert(audit_kept), paths)


def _read_tile(connection: Connection, number: int) -> list[Leaf]:
    """Return the leaves of a tile; raises AuditVerificationError unless they are those of the tree."""
    start, end = number * TILE_WIDTH, (number + 1) * TILE_WIDTH
    leaves = read_leaves(connection, start, end)
    is_whole = [leaf.index for leaf in leaves] == list(range(start, end))
    is_whole = is_whole and all(hash_leaf(leaf.leaf) == leaf.leaf_hash for leaf in leaves)
    root = root_from_leaf_hashes(leaf.leaf_hash for leaf in leaves)
    if not is_whole or tiles_of(connection).read(1, number, number + 1) != [root]:
        raise AuditVerificationError(
            f"stored entries between {start} and {end - 1} are not those of the log: nothing of them is "
            "disposed of; keep the database as it is, and compare it with an export"
        )
    return leaves


def _needed(connection: Connection, leaves: Sequence[Leaf], below: int, met: MutableSet[str]) -> list[Leaf]:
    """
    Return those that later entries are judged by, the newest first.

    They are some types, intents of requests that end later, and the newest entry of each gateway's sequence:
    `met` has the gateways of which a newer entry is below, and gets those of these leaves.
    """
    intents = [leaf.request_id for leaf in leaves if leaf.type == _INTENT and leaf.request_id]
    later = _ended_later(connection, intents, below)
    return [
        leaf
        for leaf in reversed(leaves)
        if _is_newest(leaf, met)
        or (leaf.type == _INTENT and leaf.request_id in later)
        or leaf.type in _OUTLIVE
    ]


def _is_newest(leaf: Leaf, met: MutableSet[str]) -> bool:
    place = place_of(leaf)
    if place is None or place[0] in met:
        return False
    met.add(place[0])
    return True


def _ended_later(connection: Connection, request_ids: Sequence[str], below: int) -> set[str]:
    query = select(audit_leaves.c.request_id).where(
        audit_leaves.c.type.in_(_ENDS), audit_leaves.c.idx >= below
    )
    return {
        request_id
        for at in range(0, len(request_ids), _NAMES)
        for request_id in connection.scalars(
            query.where(audit_leaves.c.request_id.in_(request_ids[at : at + _NAMES]))
        )
    }


def _drop_superseded(connection: Connection, below: int) -> None:
    """Drop what an earlier disposal kept, and this one would not."""
    kept = read_leaves(connection, 0, below, besides=_OUTLIVE)
    needed = {leaf.index for leaf in _needed(connection, kept, below, set())}
    for leaf in kept:
        if leaf.index not in needed:
            connection.execute(delete(audit_leaves).where(audit_leaves.c.idx == leaf.index))
            connection.execute(delete(audit_kept).where(audit_kept.c.idx == leaf.index))
