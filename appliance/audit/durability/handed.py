"""
Entries that the log was given and has not settled yet.

What becomes of one is told in the same moment, not by a callback later: no entry can be handed over
between the refusal of an intent and the moment its owner knows of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from appliance.audit.pending import NOT_PLACED, Kept, Pending, Receipt
from appliance.audit.registry import EntryType
from appliance.errors import AuditError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handed(Pending):
    """An entry that tells its owner what became of it."""

    owner: "InFlight"
    drained: bool = False
    """Whether it is kept elsewhere already, and handed over from there."""

    def succeed(self, index: int) -> None:
        """Tell the owner, then whoever waits."""
        self.owner.forget(self)
        Pending.succeed(self, index)

    def fail(self, error: AuditError) -> None:
        """Tell the owner, who decides what whoever waits is told."""
        self.owner.refused(self, error)

    def give_up(self, error: AuditError) -> None:
        """Tell whoever waits that the entry is kept nowhere."""
        Pending.fail(self, error)

    def acknowledge(self, kept: Kept) -> None:
        """Tell whoever waits that the entry is not in the log, and where it is."""
        if not self.future.done():
            self.future.set_result(Receipt(index=NOT_PLACED, entry_id=self.entry.id, kept=kept))

    @property
    def is_settled(self) -> bool:
        """Whether somebody was told what became of it; a caller that left was told nothing."""
        return self.future.done() and not self.future.cancelled()

    @property
    def begins(self) -> bool:
        """Whether it is the intent of a request."""
        return self.type is EntryType.REQUEST_INTENT

    @property
    def ends(self) -> bool:
        """Whether it ends a request."""
        return self.type.closes_request


class InFlight:
    """The entries the log has, oldest first, with the time each was handed over."""

    def __init__(self, refused: Callable[[Handed, AuditError], None], now: Callable[[], float]) -> None:
        self.refused = refused
        self._now = now
        self._entries: dict[str, tuple[Handed, float]] = {}

    def __iter__(self) -> Iterator[Handed]:
        """Yield the entries, oldest first."""
        return (handed for handed, _ in self._entries.values())

    def __bool__(self) -> bool:
        """Whether the log owes an answer."""
        return bool(self._entries)

    def own(self, pending: Pending, *, drained: bool = False) -> Handed:
        """Return an entry that will tell us what became of it."""
        return Handed(
            entry=pending.entry,
            leaf=pending.leaf,
            future=pending.future,
            saw=pending.saw,
            owner=self,
            drained=drained,
        )

    def add(self, handed: Handed) -> None:
        """Note an entry that the log has taken."""
        self._entries[handed.entry.id] = handed, self._now()

    def forget(self, handed: Handed) -> None:
        """Note that the log has settled an entry."""
        self._entries.pop(handed.entry.id, None)

    def age_seconds(self) -> float:
        """How long the oldest entry has been waiting; 0 for none."""
        oldest = next(iter(self._entries.values()), None)
        return self._now() - oldest[1] if oldest else 0.0
