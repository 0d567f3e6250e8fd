"""
The tree's hashes above the leaves in a database: one row for each full tile of the level below.

A row is added in the transaction of the leaf that completes its tile, and never changes.  Gateways of a
version without these rows may append meanwhile: whoever completes the next tile adds theirs as well.

Statements are the driver's own: a commit to SQLite does not go through SQLAlchemy.
"""

from collections.abc import Callable
from typing import Any

from appliance.audit.merkle import LEVEL_BITS, TILE_WIDTH, root_from_leaf_hashes

Execute = Callable[[str, tuple[Any, ...]], Any]
"""Runs a statement with parameters, and returns the driver's cursor or what stands for it."""


class TileHashes:
    """Rows of `audit_tile_hashes` and hashes of leaves, in the transaction of the caller."""

    def __init__(self, execute: Execute, mark: str = "?") -> None:
        self._execute, self._mark = execute, mark

    def read(self, level: int, start: int, end: int) -> list[bytes]:
        """Return those of the hashes from `start` to `end` that follow each other from `start` on."""
        if level:
            query = (
                "SELECT number, hash FROM audit_tile_hashes "
                "WHERE level = ? AND number >= ? AND number < ? ORDER BY number"
            )
            rows = self._run(query, level, start, end).fetchall()
        else:
            query = "SELECT idx, leaf_hash FROM audit_leaves WHERE idx >= ? AND idx < ? ORDER BY idx"
            rows = self._run(query, start, end).fetchall()
        return [_bytes(row[1]) for at, row in enumerate(rows, start) if row[0] == at]

    def count(self, level: int) -> int:
        newest = self._run("SELECT max(number) FROM audit_tile_hashes WHERE level = ?", level).fetchone()[0]
        return 0 if newest is None else newest + 1

    def stored(self, size: int) -> int:
        """Return how many rows a log of `size` entries has up to the newest of each level."""
        level, total = 1, 0
        while (count := size >> LEVEL_BITS * level) > 0:
            total += min(count, self.count(level))
            level += 1
        return total

    def complete(self, size: int, *, most: int | None = None) -> bool:
        """
        Add the rows that a log of `size` entries lacks behind the newest of each level; at most `most`.

        Returns whether all are there then.  Stops where hashes of the level below are missing: that is
        damage, which who reads them reports.
        """
        level, added = 1, 0
        while (count := size >> LEVEL_BITS * level) > 0:
            for number in range(self.count(level), count):
                if added == most:
                    return False
                tile = self.read(level - 1, number * TILE_WIDTH, (number + 1) * TILE_WIDTH)
                if len(tile) < TILE_WIDTH:
                    return True
                self._run(
                    "INSERT INTO audit_tile_hashes (level, number, hash) VALUES (?, ?, ?)",
                    level,
                    number,
                    root_from_leaf_hashes(tile),
                )
                added += 1
            level += 1
        return True

    def _run(self, query: str, *values: object) -> Any:  # noqa: ANN401 - the driver's
        return self._execute(query.replace("?", self._mark), values)


def completes_tile(old_size: int, new_size: int) -> bool:
    return new_size // TILE_WIDTH > old_size // TILE_WIDTH


def tile_rows(size: int) -> int:
    """Return how many rows a log of `size` entries has."""
    total = 0
    while (size := size >> LEVEL_BITS) > 0:
        total += size
    return total


def _bytes(value: bytes | str) -> bytes:
    """The value of a column; in SQLite it can be text if it was altered."""
    return value if isinstance(value, bytes) else str(value).encode()
