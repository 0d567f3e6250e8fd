"""
Checkpoints with witnesses' cosignatures, kept in the log's database.

A cosignature covers every entry before it, so an older one is dropped once the same witnesses have cosigned a
larger tree.  A row is evidence, not state: if it is lost, the witness can give it again, and the log
continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.exc import IntegrityError

from appliance.audit.checkpoint import parse_note, with_signatures
from appliance.audit.tables import audit_cosigned
from appliance.errors import AuditUnavailableError
from appliance.infra.database import SqlStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosigned:
    """A checkpoint of this log that one witness has cosigned."""

    witness: str
    size: int
    time: int
    """When, in seconds since the epoch, by the witness's clock."""
    note: str
    """The checkpoint with the log's and the witness's signatures."""


class CosignedCheckpoints(SqlStore):
    subject = "cosignatures"
    unavailable = AuditUnavailableError

    def save(self, cosigned: Cosigned) -> None:
        """Keep a statement, and drop those it makes worthless; raises AuditUnavailableError."""
        try:
            self._save(cosigned)
        except AuditUnavailableError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            self._save(cosigned)  # another gateway received the same at the same moment

    def _save(self, cosigned: Cosigned) -> None:
        with self._writing() as connection:
            known = _read(connection)
            kept = worth_keeping([*known, cosigned])
            for statement in known:
                if statement not in kept:
                    mine = (audit_cosigned.c.witness == statement.witness) & (
                        audit_cosigned.c.size == statement.size
                    )
                    connection.execute(delete(audit_cosigned).where(mine))
            if cosigned in kept and cosigned not in known:
                connection.execute(
                    insert(audit_cosigned).values(
                        witness=cosigned.witness, size=cosigned.size, time=cosigned.time, note=cosigned.note
                    )
                )

    def all(self) -> list[Cosigned]:
        """Return every statement that is kept, the largest first; raises AuditUnavailableError."""
        with self._reading() as connection:
            return _read(connection)


def newest_by_witness(cosigned: Sequence[Cosigned]) -> dict[str, Cosigned]:
    newest = sorted(cosigned, key=lambda statement: (statement.size, statement.time))
    return {statement.witness: statement for statement in newest}


def worth_keeping(cosigned: Sequence[Cosigned]) -> list[Cosigned]:
    """Return those without a larger tree cosigned by the same witnesses, one per witness and size."""
    newest = {(one.size, one.witness): one for one in sorted(cosigned, key=attrgetter("time"))}
    kept: list[Cosigned] = []
    seen: list[frozenset[str]] = []
    for size in sorted({size for size, _ in newest}, reverse=True):
        names = frozenset(name for other, name in newest if other == size)
        if not any(names <= larger for larger in seen):
            seen.append(names)
            kept += [newest[size, name] for name in sorted(names)]
    return kept


def merge_notes(cosigned: Sequence[Cosigned]) -> list[tuple[int, str]]:
    """
    Return size and text of each cosigned checkpoint, with the signatures of all its witnesses.

    Two of one size are two histories: both are returned, as proof of it.
    """
    merged: dict[str, tuple[int, str]] = {}
    for statement in cosigned:
        text = parse_note(statement.note).text
        if text in merged:
            lines = statement.note.rpartition("\n\n")[2].splitlines(keepends=True)
            merged[text] = statement.size, with_signatures(merged[text][1], lines)
        else:
            merged[text] = statement.size, statement.note
    return list(merged.values())


def _read(connection: Connection) -> list[Cosigned]:
    rows = connection.execute(select(audit_cosigned)).all()
    found = [Cosigned(witness=row.witness, size=row.size, time=row.time, note=row.note) for row in rows]
    return sorted(found, key=lambda statement: (-statement.size, statement.witness))
