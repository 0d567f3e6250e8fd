"""
An entry on its way into the log: encoded, stamped, and promised to somebody.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.audit.entry import JSON, Entry, encode, format_time, new_entry_id
from appliance.audit.registry import EntryType
from appliance.errors import AuditError


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Where a durable entry stands."""

    index: int
    entry_id: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    """One entry, its leaf, and the future of whoever waits for it."""

    entry: Entry
    leaf: bytes
    future: asyncio.Future[Receipt]

    @property
    def type(self) -> EntryType:
        """Type of the entry."""
        return self.entry.type

    @property
    def request_id(self) -> str | None:
        """Request the entry is about, if any."""
        value = self.entry.fields.get("request_id")
        return value if isinstance(value, str) else None

    def succeed(self, index: int) -> None:
        """Tell whoever waits that the entry is durable."""
        if not self.future.done():
            self.future.set_result(Receipt(index=index, entry_id=self.entry.id))

    def fail(self, error: AuditError) -> None:
        """Tell whoever waits that the entry is not durable, as far as is known."""
        if not self.future.done():
            self.future.set_exception(again(error))


class EntryMaker:
    """Stamps entries with log, id and time, and encodes them; needs a running event loop."""

    def __init__(
        self, *, origin: str, clock: Callable[[], float], random_bytes: Callable[[int], bytes]
    ) -> None:
        self.origin = origin
        self._clock = clock
        self._random_bytes = random_bytes

    def make(self, entry_type: EntryType, fields: Mapping[str, JSON | None]) -> Pending:
        """
        Return a pending entry; fields of None are left out.

        Raises:
            AuditEntryError: the fields do not fit the type.
        """
        now_ms = int(self._clock() * 1000)
        entry = Entry(
            log=self.origin,
            id=new_entry_id(now_ms, self._random_bytes(10)),
            type=entry_type,
            time=format_time(now_ms),
            fields={name: value for name, value in fields.items() if value is not None},
        )
        leaf = encode(entry)
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        # Whoever submitted it may have stopped waiting; the failure is in the log's state, too.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Pending(entry=entry, leaf=leaf, future=future)


def again(error: AuditError) -> AuditError:
    """Return the same error anew: one exception raised in many tasks would pile up tracebacks."""
    return type(error)(str(error))
