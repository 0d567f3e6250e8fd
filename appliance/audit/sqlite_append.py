"""
Commits to SQLite on the path of every request, on a connection of their own.

The statements are those of `SqlAuditStore._write`, given to the driver directly: what SQLAlchemy
does between takes longer than the commit.  Few calls, because after each one the writer's thread
waits until the event loop lets go of the interpreter.

Not shared between threads: only the log's writer appends.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Engine, PoolProxiedConnection

from appliance.audit.stored import Head, Leaf
from appliance.audit.tables import audit_leaves
from appliance.errors import AuditForkError

_COLUMNS = tuple(column.name for column in audit_leaves.columns)
_MOVE = "UPDATE audit_head SET size = ?, root = ?, frontier = ? WHERE id = 1 AND size = ? AND root = ?"
MOST_ROWS = 2048
"""Rows of one statement: SQLite takes 32,766 values."""


class SqliteAppender:
    """Appends batches of leaves, each in one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: PoolProxiedConnection | None = None

    def append(self, leaves: Sequence[Leaf], *, expected: Head, new: Head) -> None:
        """
        Move the head and add the leaves, durably.

        Raises:
            AuditForkError: the head is not the expected one.
            sqlite3.Error, SQLAlchemyError: whatever the database says; whether the leaves are in it is
                then in doubt only if it said so about the commit.
        """
        if self._connection is None:
            self._connection = self._engine.raw_connection()
        try:
            _commit(self._connection.driver_connection, leaves, expected, new)
        except BaseException:
            # Rolled back by being closed; the next batch gets a connection that knows nothing of this.
            self.close()
            raise

    def close(self) -> None:
        """Drop the connection; the next append opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()


def _commit(driver: Any, leaves: Sequence[Leaf], expected: Head, new: Head) -> None:  # noqa: ANN401 - the driver's
    driver.execute("BEGIN IMMEDIATE")
    move = (new.size, new.root, b"".join(new.subtrees), expected.size, expected.root)
    # The head comes first: its row stays locked, so the comparison still holds at commit.
    if driver.execute(_MOVE, move).rowcount != 1:
        raise AuditForkError(f"another writer moved the audit log on from size {expected.size}")
    at = 0
    while at < len(leaves):
        count = min(MOST_ROWS, 1 << (len(leaves) - at).bit_length() - 1)
        driver.execute(_insert(count), _values(leaves[at : at + count]))
        at += count
    driver.execute("COMMIT")


@lru_cache
def _insert(count: int) -> str:
    """The statement for a power of two rows: few texts, so the driver keeps all of them compiled."""
    row = f"({', '.join('?' * len(_COLUMNS))})"
    return f"INSERT INTO audit_leaves ({', '.join(_COLUMNS)}) VALUES {', '.join([row] * count)}"  # noqa: S608 - names of ours


def _values(leaves: Sequence[Leaf]) -> list[Any]:
    return [
        value
        for leaf in leaves
        for value in (leaf.index, leaf.leaf, leaf.leaf_hash, leaf.type, leaf.request_id)
    ]
