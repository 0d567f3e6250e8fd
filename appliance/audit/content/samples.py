"""
Samples for training a draft: rows beside the kept content they were made of, for exactly as long.

A sample is sealed like content, under the key that wraps the request's body at that moment, and it
goes in only while the body is there.  So whatever ends the content ends the sample, with nothing to
keep in step: erasure, pruning, holds, wrapping anew, a start that finishes what a crash
interrupted.  Fails closed, as the store of payloads does.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sqlalchemy import Delete, and_, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from appliance.audit.content.payloads import CHUNK, Payload, SqlPayloadStore, row_of
from appliance.audit.content.sealing import Part
from appliance.audit.registry import EntryType
from appliance.audit.tables import audit_leaves, audit_payloads

_COLUMNS = audit_payloads.c


class Beside(Enum):
    """What became of a sample that was to be kept beside a request's content."""

    KEPT = auto()
    THERE = auto()
    """There is one already, and it stays."""
    GONE = auto()
    """The content was erased meanwhile, so nothing was kept."""
    MOVED = auto()
    """Another key wraps the content by now; nothing was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request of which body and answer are kept, and what its outcome says."""

    request_id: str
    tenant: str
    entry: dict[str, Any]
    """Members of its `request.outcome`."""


class SqlSampleStore(SqlPayloadStore):
    """Payloads in the audit log's database, and samples beside them."""

    def add_sample(self, sample: Payload, *, instead_of: Payload | None = None) -> Beside:
        """
        Keep a sample beside the content it was made of, if that is still there, under the same key.

        The row of the body stays locked until the sample is in: an erasure comes before it, and it
        is not kept, or after it, and takes it along.  The same key: what destroys the one destroys
        the other, also for whoever kept a copy of the database.

        Args:
            sample: its key is the one that wraps the request's body now.
            instead_of: a sample it takes the place of, if that one is still there.
        """
        mine = and_(_COLUMNS.request_id == sample.request_id, _COLUMNS.tenant == sample.tenant)
        body = select(_COLUMNS.key_id).where(mine, _COLUMNS.part == Part.REQUEST.value)
        answer = select(_COLUMNS.key_id).where(mine, _COLUMNS.part == Part.RESPONSE.value)
        dialect = postgresql if self._is_postgresql else sqlite
        add = dialect.insert(audit_payloads).values(row_of(sample)).on_conflict_do_nothing()
        with self._transaction("kept") as connection:
            if not self._is_postgresql:
                connection.exec_driver_sql("PRAGMA secure_delete = ON")
            # One row is locked and no more, so that an erasure that holds others is never waited for
            # while it waits for this one.
            key_id = connection.scalar(body.with_for_update())
            if key_id is None or connection.scalar(answer) is None:
                return Beside.GONE
            if key_id != sample.key_id:
                return Beside.MOVED
            if instead_of is not None:
                connection.execute(_removal(instead_of))
            return Beside.KEPT if connection.execute(add).rowcount == 1 else Beside.THERE
        # A crash before this line: a sample that no manifest names, or none.

    def remove_sample(self, sample: Payload) -> None:
        """Delete a sample; one that took its place stays."""
        with self._transaction("erased") as connection:
            if not self._is_postgresql:
                connection.exec_driver_sql("PRAGMA secure_delete = ON")
            connection.execute(_removal(sample))

    def answered(self, tenants: Collection[str], *, since: str = "") -> Iterator[Answered]:
        """
        Yield the requests of some tenants of which body and answer are kept, the newest first.

        Only the log is read for it, no content; in pages, each in a transaction of its own.

        Args:
            tenants: names of them.
            since: smallest request id; see `first_id`.
        """
        answer = audit_payloads.alias("answer")
        kept = and_(answer.c.request_id == _COLUMNS.request_id, answer.c.part == Part.RESPONSE.value)
        ended = and_(
            audit_leaves.c.request_id == _COLUMNS.request_id,
            audit_leaves.c.type == EntryType.REQUEST_OUTCOME.value,
        )
        query = (
            select(_COLUMNS.request_id, _COLUMNS.tenant, audit_leaves.c.leaf)
            .join(answer, kept)
            .join(audit_leaves, ended)
            .where(
                _COLUMNS.part == Part.REQUEST.value,
                _COLUMNS.tenant.in_(sorted(tenants)),
                _COLUMNS.request_id >= since,
            )
            .order_by(_COLUMNS.request_id.desc())
            .limit(CHUNK)
        )
        page = query
        while True:
            with self._reading() as connection:
                rows = connection.execute(page).all()
            for row in rows:
                yield Answered(request_id=row.request_id, tenant=row.tenant, entry=json.loads(row.leaf))
            if len(rows) < CHUNK:
                return
            page = query.where(_COLUMNS.request_id < rows[-1].request_id)


def _removal(sample: Payload) -> Delete:
    # Whatever wraps it by now, its nonce is no other's.
    return delete(audit_payloads).where(
        _COLUMNS.request_id == sample.request_id,
        _COLUMNS.part == Part.SAMPLE.value,
        _COLUMNS.nonce == sample.sealed.nonce,
    )
