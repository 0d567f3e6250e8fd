"""
Requests that have an intent in the log and no end yet.

Pure bookkeeping, done when an entry is handed over, not when it is durable: entries become durable
in that order.  It refuses what would make the log invalid for every later verifier.
"""

from collections.abc import Iterable

from appliance.audit.entry_types import EntryType
from appliance.errors import AuditEntryError


class OpenRequests:
    def __init__(self, request_ids: Iterable[str] = ()) -> None:
        self._open = dict.fromkeys(request_ids)  # a dict, for its order
        # Requests of which an entry is kept elsewhere until the store takes entries again.
        self._delegated: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, entry_type: EntryType, request_id: str | None) -> None:
        """Follow an entry that is being handed over; raises AuditEntryError for a wrong beginning or end."""
        if request_id is None:
            return
        if entry_type is EntryType.REQUEST_INTENT:
            if request_id in self._open:
                raise AuditEntryError(
                    f"request {request_id} has an intent already: request ids are never reused"
                )
            self._open[request_id] = None
        elif entry_type.closes_request:
            if request_id not in self._open:
                raise AuditEntryError(f"request {request_id} has no open intent, so it cannot end")
            del self._open[request_id]

    def forget(self, entry_type: EntryType, request_id: str | None) -> None:
        """Drop a request whose intent did not become durable; its caller knows."""
        if entry_type is EntryType.REQUEST_INTENT and request_id is not None:
            self._open.pop(request_id, None)

    def delegate_outcome(self, request_id: str) -> None:
        """Leave the end of a request to the caller, which keeps its entries while the store takes none."""
        self._open.pop(request_id, None)
        self._delegated.add(request_id)

    def readmit(self, entry_type: EntryType, request_id: str | None) -> None:
        """Follow an entry that was kept elsewhere and is now in the log, or on its way into it."""
        if request_id is None:
            return
        if entry_type is EntryType.REQUEST_INTENT:
            self._delegated.discard(request_id)
            self._open[request_id] = None
        elif entry_type.closes_request:
            self._delegated.discard(request_id)
            self._open.pop(request_id, None)

    def end_elsewhere(self, request_ids: Iterable[str]) -> None:
        """Follow what is in the log without having been handed over here."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def take_all(self) -> list[str]:
        """Return every open request, oldest first, and forget them."""
        taken = list(self._open)
        self._open.clear()
        return taken

    def abandoned(self, stored: Iterable[str], ending: Iterable[str | None]) -> list[str]:
        """
        Return the requests that no caller will end, because a failed commit left an entry in the store.

        `stored` are the requests open in the store, `ending` those whose end is queued.
        """
        expected = {*self._open, *self._delegated, *ending}
        return [request_id for request_id in stored if request_id not in expected]
