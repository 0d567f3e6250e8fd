"""
Entries that the log was given and has not settled yet.

An entry reports to its owner in the moment it is settled, not by a callback later: no entry can be handed
over between the refusal of an intent and the moment its owner knows of it.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from appliance.audit.entry_types import EntryType
from appliance.audit.pending import NOT_PLACED, Kept, Pending, Receipt
from appliance.errors import AuditError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrackedEntry(Pending):
    owner: "InFlight"
    is_drained: bool = False
    """Whether it is in the spool already, and was handed over from there."""

    def succeed(self, index: int, placing: asyncio.Future[int] | None = None) -> None:
        self.owner.forget(self)
        Pending.succeed(self, index, placing)

    def fail(self, error: AuditError) -> None:
        self.owner.refused(self, error)

    def give_up(self, error: AuditError) -> None:
        """Tell the caller that the entry is kept nowhere."""
        Pending.fail(self, error)

    def acknowledge_spooled(self) -> None:
        """Tell the caller that the entry is in the spool."""
        if not self.future.done():
            receipt = Receipt(index=NOT_PLACED, entry_id=self.entry.id, kept=Kept.SPOOLED)
            self.future.set_result(receipt)

    @property
    def is_settled(self) -> bool:
        """Whether the caller has an answer; a caller that left has none."""
        return self.future.done() and not self.future.cancelled()

    @property
    def begins_request(self) -> bool:
        return self.type is EntryType.REQUEST_INTENT

    @property
    def ends_request(self) -> bool:
        return self.type.closes_request


class InFlight:
    """The entries the log has, oldest first, with the time each was handed over."""

    def __init__(self, refused: Callable[[TrackedEntry, AuditError], None], now: Callable[[], float]) -> None:
        self.refused = refused
        self._now = now
        self._entries: dict[str, tuple[TrackedEntry, float]] = {}

    def __iter__(self) -> Iterator[TrackedEntry]:
        return (entry for entry, _ in self._entries.values())

    def __bool__(self) -> bool:
        return bool(self._entries)

    def track(self, pending: Pending, *, is_drained: bool = False) -> TrackedEntry:
        """Return an entry that reports to this object."""
        return TrackedEntry(
            entry=pending.entry,
            leaf=pending.leaf,
            future=pending.future,
            on_settled=pending.on_settled,
            owner=self,
            is_drained=is_drained,
        )

    def add(self, entry: TrackedEntry) -> None:
        """Note an entry that the log has taken."""
        self._entries[entry.entry.id] = entry, self._now()

    def forget(self, entry: TrackedEntry) -> None:
        """Note that the log has settled an entry."""
        self._entries.pop(entry.entry.id, None)

    def age_seconds(self) -> float:
        """How long the oldest entry has been waiting; 0 for none."""
        oldest = next(iter(self._entries.values()), None)
        return self._now() - oldest[1] if oldest else 0.0
