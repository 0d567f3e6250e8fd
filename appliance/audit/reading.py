"""
Recording that somebody reads the log: an `audit.read` entry, written before anything is shown.

A running gateway writes it for the reader (`appliance.api.audit`).  Where none answers, `record`
adds the one entry itself, by the same compare-and-swap as every writer; the next checkpoint signs
it.  Fails closed: an error means that nothing was recorded, as far as is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.audit.entry import JSON, Entry, encode, format_time, new_entry_id
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.registry import REGISTRY, EntryType
from appliance.audit.store import AuditStore, Head, Leaf
from appliance.errors import AuditVerificationError

OPERATIONS = REGISTRY[EntryType.AUDIT_READ].fields["operation"].values
"""Ways of reading that can be recorded."""
MAX_PURPOSE_CHARACTERS = 200
_ID_RANDOM_BYTES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Who is about to read what, and why."""

    account: str
    """Operating-system account of the reader."""
    operation: str
    """One of `OPERATIONS`."""
    start: int
    """Index of the first entry read."""
    end: int
    """Index after the last entry read."""
    purpose: str = ""
    """In the reader's words; empty for not given."""

    def fields(self, key_id: str | None = None) -> dict[str, JSON | None]:
        """Return the fields of its entry; `key_id` is the admin key that came with it, if one did."""
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
    now_ms = int(clock() * 1000)
    fields = {name: value for name, value in reading.fields().items() if value is not None}
    leaf = encode(
        Entry(
            log=origin,
            id=new_entry_id(now_ms, random_bytes(_ID_RANDOM_BYTES)),
            type=EntryType.AUDIT_READ,
            time=format_time(now_ms),
            fields=fields,
        )
    )
    placed: list[Leaf] = []

    def make(head: Head, _newer: Sequence[Leaf]) -> tuple[Sequence[Leaf], Head]:
        tree = CompactRange(head.size, head.subtrees)
        if tree.root() != head.root:
            raise AuditVerificationError("the audit database is damaged: its head does not add up")
        leaf_hash, kind = hash_leaf(leaf), EntryType.AUDIT_READ.value
        tree.append(leaf_hash)
        placed[:] = [Leaf(index=head.size, leaf=leaf, leaf_hash=leaf_hash, type=kind, request_id=None)]
        return placed, Head.of(tree)

    store.append_behind(store.head().size, make)
    return placed[0].index
