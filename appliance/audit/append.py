"""
Adds one entry to a log that gateways may be writing: for commands, which have no open log.

The same compare-and-swap as every writer's adds it; the next checkpoint signs it.  Fails closed: an error
means that nothing was recorded, as far as is known.
"""

import os
from collections.abc import Callable, Mapping, Sequence

from appliance.audit.entry import JSON, encode, new_entry
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange
from appliance.audit.store import AuditStore, Head, Leaf
from appliance.errors import AuditVerificationError


def append_entry(
    store: AuditStore,
    entry_type: EntryType,
    fields: Mapping[str, JSON | None],
    *,
    origin: str,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> int:
    """Add the entry, without fields that are None, and return its index once durable; raises AuditError."""
    leaf = encode(new_entry(origin, entry_type, fields, clock=clock, random_bytes=random_bytes))
    placed: list[Leaf] = []

    def make(head: Head, _newer: Sequence[Leaf]) -> tuple[Sequence[Leaf], Head]:
        tree = CompactRange(head.size, head.subtrees)
        if tree.root() != head.root:
            raise AuditVerificationError("the audit database is damaged: its head does not match its tree")
        placed[:] = [Leaf.of(head.size, leaf, entry_type)]
        tree.append(placed[0].leaf_hash)
        return placed, Head.of(tree)

    store.append_behind(store.head().size, make)
    return placed[0].index
