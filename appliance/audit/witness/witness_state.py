"""
What a witness remembers: of each log the newest checkpoint it cosigned, in a SQLite file of its own.

This file is the witness.  Check and update are one transaction that takes the write lock first, so
two requests cannot both build on the same state, and a commit that returned survives a power cut.
Restored from an old copy, the witness would cosign again what it has cosigned otherwise since: never
restore it; a witness that lost its file starts again under a new name and key.  Fails closed.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import AuditUnavailableError

BUSY_SECONDS = 5.0
MAX_REFUSED = 100
"""Refused checkpoints kept of each log: the first ones, as later ones only repeat what they prove."""

_TABLES = """
    CREATE TABLE IF NOT EXISTS heads (
        origin TEXT PRIMARY KEY, size INTEGER NOT NULL, root BLOB NOT NULL, note TEXT NOT NULL
    );
    CREATE TABLE IF NOT EXISTS refused (
        origin TEXT NOT NULL, time INTEGER NOT NULL, reason TEXT NOT NULL, request TEXT NOT NULL
    )
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessedHead:
    """The newest checkpoint cosigned of one log."""

    size: int
    root: bytes
    note: str
    """With the log's signatures and the witness's."""


class Session:
    """One transaction on the state."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def latest(self, origin: str) -> WitnessedHead | None:
        query = "SELECT size, root, note FROM heads WHERE origin = ?"
        row = self._connection.execute(query, (origin,)).fetchone()
        return WitnessedHead(size=row[0], root=row[1], note=row[2]) if row else None

    def notes(self) -> dict[str, str]:
        """The newest checkpoint cosigned of each log, by origin."""
        return dict(self._connection.execute("SELECT origin, note FROM heads ORDER BY origin").fetchall())

    def save(self, origin: str, head: WitnessedHead) -> None:
        self._connection.execute(
            "INSERT INTO heads VALUES (?, ?, ?, ?) ON CONFLICT (origin) DO UPDATE "
            "SET size = excluded.size, root = excluded.root, note = excluded.note",
            (origin, head.size, head.root, head.note),
        )

    def refuse(self, origin: str, time: int, reason: str, request: str) -> None:
        """Keep a checkpoint that the log signed and that was refused: it may prove a second history."""
        counted = "SELECT count(*) FROM refused WHERE origin = ?"
        if self._connection.execute(counted, (origin,)).fetchone()[0] < MAX_REFUSED:
            row = (origin, time, reason, request)
            self._connection.execute("INSERT INTO refused VALUES (?, ?, ?, ?)", row)


class WitnessState:
    """The file; any number of processes may use it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def exclusive(self) -> Iterator[Session]:
        """
        Run one exclusive transaction; it is durable when the block has ended.

        After AuditUnavailableError nothing has changed.
        """
        try:
            opened = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            with closing(opened) as connection:
                # Not WAL: between transactions, one file is the whole state.
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("BEGIN IMMEDIATE")
                for statement in _TABLES.split(";"):
                    connection.execute(statement)
                # An error before COMMIT closes the connection, and SQLite rolls the transaction back.
                yield Session(connection)
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            message = f"the witness's state {self._path} cannot be used: {error}"
            raise AuditUnavailableError(message) from error
