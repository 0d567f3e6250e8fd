"""Entries on their way into the log: encoded, stamped, each with a future for its caller."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from appliance.audit.entry import JSON, Entry, decode, encode, new_entry
from appliance.audit.entry_types import EntryType
from appliance.errors import AuditEntryError, AuditError


class Kept(StrEnum):
    LOGGED = "logged"
    SPOOLED = "spooled"
    """On this machine's disk, until the log takes it."""


NOT_PLACED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    index: int
    """`NOT_PLACED` while it is in the spool, or was accepted and is not integrated."""
    entry_id: str
    kept: Kept = Kept.LOGGED
    placing: asyncio.Future[int] | None = field(default=None, compare=False, repr=False)
    """Done, with the index, once an accepted entry is integrated."""

    @property
    def known_index(self) -> int | None:
        if self.placing is not None and self.placing.done() and not self.placing.cancelled():
            return None if self.placing.exception() else self.placing.result()
        return None if self.index == NOT_PLACED else self.index


def _ignore(_type: EntryType, _error: AuditError | None) -> None:
    """Observe nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    entry: Entry
    leaf: bytes
    future: asyncio.Future[Receipt]
    on_settled: Callable[[EntryType, AuditError | None], None] = _ignore
    """Called when an entry became durable, or with the error."""

    @property
    def type(self) -> EntryType:
        return self.entry.type

    @property
    def request_id(self) -> str | None:
        value = self.entry.fields.get("request_id")
        return value if isinstance(value, str) else None

    def succeed(self, index: int, placing: asyncio.Future[int] | None = None) -> None:
        self.on_settled(self.type, None)
        if not self.future.done():
            self.future.set_result(Receipt(index=index, entry_id=self.entry.id, placing=placing))

    def fail(self, error: AuditError) -> None:
        """Tell the caller that the entry is not durable, as far as is known."""
        self.on_settled(self.type, error)
        if not self.future.done():
            self.future.set_exception(copy_error(error))


class EntryMaker:
    """Stamps entries with log, id and time, and encodes them; needs a running event loop."""

    def __init__(
        self,
        *,
        origin: str,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        on_settled: Callable[[EntryType, AuditError | None], None] = _ignore,
        gateway: str | None = None,
    ) -> None:
        self.origin, self._gateway, self._on_settled = origin, gateway, on_settled
        self._clock, self._random_bytes = clock, random_bytes

    def make(self, entry_type: EntryType, fields: Mapping[str, JSON | None]) -> Pending:
        """Return a pending entry; fields of None are omitted.  Raises AuditEntryError."""
        entry = self._new(entry_type, fields)
        return self._promise(entry, encode(entry))

    def leaf(self, entry_type: EntryType, fields: Mapping[str, JSON | None]) -> bytes:
        """Return the leaf of an entry that no caller waits for; for any thread."""
        return encode(self._new(entry_type, fields))

    def _new(self, entry_type: EntryType, fields: Mapping[str, JSON | None]) -> Entry:
        if entry_type is EntryType.REQUEST_INTENT or entry_type is EntryType.AUDIT_STARTED:
            # It begins something that this gateway has to end.
            fields = {"gateway": self._gateway, **fields}
        return new_entry(self.origin, entry_type, fields, clock=self._clock, random_bytes=self._random_bytes)

    def remake(self, leaf: bytes) -> Pending:
        """Return a pending entry for an existing leaf, with its id and time; raises AuditEntryError."""
        entry = decode(leaf)
        if entry.log != self.origin:
            raise AuditEntryError(f"an entry of the log {entry.log}, where this is {self.origin}")
        return self._promise(entry, leaf)

    def _promise(self, entry: Entry, leaf: bytes) -> Pending:
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        # The caller may have stopped waiting; the failure is in the log's state, too.
        future.add_done_callback(retrieve)
        return Pending(entry=entry, leaf=leaf, future=future, on_settled=self._on_settled)


def retrieve(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def copy_error(error: AuditError) -> AuditError:
    """Return a copy of an error: one exception raised in many tasks would accumulate tracebacks."""
    return type(error)(str(error))
