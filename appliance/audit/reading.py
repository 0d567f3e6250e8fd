"""
Records that an operator reads the log: an `audit.read` entry, written before any entry is shown.

A running gateway writes it for the reader (`appliance.api.audit`).  If none answers, the command appends the
entry itself.
"""

from dataclasses import dataclass

from appliance.audit.entry import JSON
from appliance.audit.entry_types import REGISTRY, EntryType

OPERATIONS = REGISTRY[EntryType.AUDIT_READ].fields["operation"].values
MAX_PURPOSE_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    account: str
    """Operating-system account of the reader."""
    operation: str
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
