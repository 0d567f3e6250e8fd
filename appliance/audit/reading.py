"""
Records that an operator reads the log: an `audit.read` entry, written before any entry is shown.

A running gateway writes it for the reader (`appliance.api.audit`).  If none answers, `record` appends the
entry itself.  Fails closed: an error means that nothing was recorded, as far as is known.
"""

from collections.abc import Callable
from dataclasses import dataclass

from appliance.audit.append import append_entry
from appliance.audit.entry import JSON
from appliance.audit.entry_types import REGISTRY, EntryType
from appliance.audit.store import AuditStore

OPERATIONS = REGISTRY[EntryType.AUDIT_READ].fields["operation"].values
"""Ways of reading that can be recorded."""
MAX_PURPOSE_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An operator's reading of the log."""

    account: str
    """Operating-system account of the reader."""
    operation: str
    """One of `OPERATIONS`."""
    start: int
    """Index of the first entry read."""
    end: int
    """Index after the last entry read."""
    purpose: str = ""
    """In the reader's words, or empty."""

    def fields(self, key_id: str | None = None) -> dict[str, JSON | None]:
        """Return the fields of its entry; `key_id` is the admin key in use, if any."""
        return {
            "actor": f"cli:{self.account}",
            "operation": self.operation,
            "start": self.start,
            "end": self.end,
            "purpose": self.purpose or None,
            "key_id": key_id,
        }


def record(
    store: AuditStore,
    reading: Reading,
    *,
    origin: str,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes],
) -> int:
    """
    Add the entry to a log that others may be writing to, and return its index once it is durable.

    Raises:
        AuditUnavailableError: it could not be written.
        AuditVerificationError: the head is damaged.
        AuditEntryError: the entry is larger than a leaf.
    """
    return append_entry(
        store,
        EntryType.AUDIT_READ,
        reading.fields(),
        origin=origin,
        clock=clock,
        random_bytes=random_bytes,
    )
