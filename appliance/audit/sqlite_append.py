"""
Commits to SQLite, which are on the path of every request, on a reserved connection.

The statements are those of `SqlAuditStore._write`, executed by the driver directly: SQLAlchemy's overhead
takes longer than the commit.  Few calls, because after each one the writer's thread waits for the interpreter
lock.

Not thread-safe: only the log's writer appends.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Engine, PoolProxiedConnection

from appliance.audit.stored import Head, Leaf
from appliance.audit.tables import audit_leaves
from appliance.audit.tiles import TileHashes, completes_tile
from appliance.errors import AuditForkError

_COLUMNS = tuple(column.name for column in audit_leaves.columns)
_MOVE = "UPDATE audit_head SET size = ?, root = ?, frontier = ? WHERE id = 1 AND size = ? AND root = ?"
MOST_ROWS = 2048
"""SQLite takes 32,766 values in a statement."""


class SqliteAppender:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: PoolProxiedConnection | None = None

    def append(self, leaves: Sequence[Leaf], *, expected: Head, new: Head) -> None:
        """
        Move the head and add the leaves, durably.

        Raises AuditForkError if the head is not the expected one, or sqlite3.Error or SQLAlchemyError; the
        commit is in doubt only if COMMIT itself failed.
        """
        if self._connection is None:
            self._connection = self._engine.raw_connection()
        try:
            _commit(self._connection.driver_connection, leaves, expected, new)
        except BaseException:
            # Closing rolls back; the next batch opens another connection.
            self.close()
            raise

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()


def _commit(driver: Any, leaves: Sequence[Leaf], expected: Head, new: Head) -> None:  # noqa: ANN401 - the driver's
    driver.execute("BEGIN IMMEDIATE")
    move = (new.size, new.root, b"".join(new.subtrees), expected.size, expected.root)
    # The head comes first: its row stays locked, so the comparison still holds at commit.
    if driver.execute(_MOVE, move).rowcount != 1:
        raise AuditForkError(f"another writer extended the audit log from size {expected.size}")
    at = 0
    while at < len(leaves):
        count = min(MOST_ROWS, 1 << (len(leaves) - at).bit_length() - 1)
        driver.execute(_insert(count), _values(leaves[at : at + count]))
        at += count
    if completes_tile(expected.size, new.size):
        TileHashes(driver.execute).complete(new.size)
    driver.execute("COMMIT")


@lru_cache
def _insert(count: int) -> str:
    """The statement for a power of two rows: few texts, so the driver caches all of them."""
    row = f"({', '.join('?' * len(_COLUMNS))})"
    return f"INSERT INTO audit_leaves ({', '.join(_COLUMNS)}) VALUES {', '.join([row] * count)}"  # noqa: S608 - names of ours


def _values(leaves: Sequence[Leaf]) -> list[Any]:
    return [
        value
        for leaf in leaves
        for value in (leaf.index, leaf.leaf, leaf.leaf_hash, leaf.type, leaf.request_id)
    ]
