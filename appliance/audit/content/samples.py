"""
Samples for training a draft: rows that exist exactly as long as the content they were made of.

A sample is sealed like content, under the key that wraps the request's body at that moment, and is stored
only while the body exists.  So erasure, pruning, holds, rewrapping and recovery after a crash apply to the
sample without further code.  Fails closed, as the store of payloads does.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sqlalchemy import Delete, and_, delete, select

from appliance.audit.content.payloads import CHUNK, Payload, SqlPayloadStore, row_of
from appliance.audit.content.sealing import Part
from appliance.audit.entry_types import EntryType
from appliance.audit.tables import audit_leaves, audit_payloads

_COLUMNS = audit_payloads.c


class SampleOutcome(Enum):
    KEPT = auto()
    THERE = auto()
    """A sample exists already, and stays."""
    GONE = auto()
    """The content was erased meanwhile, so nothing was kept."""
    MOVED = auto()
    """Another key wraps the content now; nothing was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request whose body and answer are kept, with its outcome."""

    request_id: str
    tenant: str
    entry: dict[str, Any]
    """Members of its `request.outcome`."""


class SqlSampleStore(SqlPayloadStore):
    def add_sample(self, sample: Payload, *, instead_of: Payload | None = None) -> SampleOutcome:
        """
        Store a sample, if its source content still exists under the same key, in place of `instead_of`.

        The row of the body stays locked until the sample is stored: an erasure comes before it, and the
        sample is not stored, or after it, and includes the sample.  The same key: destroying it also erases
        the sample in copies of the database.
        """
        mine = and_(_COLUMNS.request_id == sample.request_id, _COLUMNS.tenant == sample.tenant)
        body = select(_COLUMNS.key_id).where(mine, _COLUMNS.part == Part.REQUEST.value)
        answer = select(_COLUMNS.key_id).where(mine, _COLUMNS.part == Part.RESPONSE.value)
        add = self._insert(audit_payloads).values(row_of(sample)).on_conflict_do_nothing()
        with self._transaction("kept", overwrites=True) as connection:
            # Only one row is locked, so that this cannot deadlock with an erasure that holds others.
            key_id = connection.scalar(body.with_for_update())
            if key_id is None or connection.scalar(answer) is None:
                return SampleOutcome.GONE
            if key_id != sample.key_id:
                return SampleOutcome.MOVED
            if instead_of is not None:
                connection.execute(_removal(instead_of))
            return SampleOutcome.KEPT if connection.execute(add).rowcount == 1 else SampleOutcome.THERE
        # A crash before this line: a sample that no manifest names, or none.

    def remove_sample(self, sample: Payload) -> None:
        """Delete a sample, but not one that replaced it."""
        with self._transaction("erased", overwrites=True) as connection:
            connection.execute(_removal(sample))

    def answered(self, tenants: Collection[str], *, since: str = "") -> Iterator[Answered]:
        """
        Yield the requests of tenants whose body and answer are kept, the newest first.

        Reads only the log, no content; in pages, each in a transaction of its own.  `since` is the smallest
        request id; see `first_id`.
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
    # Its nonce identifies it, whichever key wraps it now.
    return delete(audit_payloads).where(
        _COLUMNS.request_id == sample.request_id,
        _COLUMNS.part == Part.SAMPLE.value,
        _COLUMNS.nonce == sample.sealed.nonce,
    )
