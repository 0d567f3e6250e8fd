"""
Adds one entry to a log that gateways may be writing: for commands, which have no open log.

The same compare-and-swap as every writer's adds it; the next checkpoint signs it.  Fails closed: an error
means that nothing was recorded, as far as is known.
"""

import os
from collections.abc import Callable, Mapping, Sequence

from appliance.audit.entry import JSON, Entry, encode, format_time, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.store import AuditStore, Head, Leaf
from appliance.errors import AuditVerificationError

_ID_RANDOM_BYTES = 10


def append_entry(
    store: AuditStore,
    entry_type: EntryType,
    fields: Mapping[str, JSON | None],
    *,
    origin: str,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> int:
    """
    Add the entry, without the fields that are None, and return its index once it is durable.

    Raises:
        AuditUnavailableError: it could not be written.
        AuditVerificationError: the head is damaged.
        AuditEntryError: the entry is larger than a leaf.
    """
    now_ms = int(clock() * 1000)
    leaf = encode(
        Entry(
            log=origin,
            id=new_entry_id(now_ms, random_bytes(_ID_RANDOM_BYTES)),
            type=entry_type,
            time=format_time(now_ms),
            fields={name: value for name, value in fields.items() if value is not None},
        )
    )
    placed: list[Leaf] = []

    def make(head: Head, _newer: Sequence[Leaf]) -> tuple[Sequence[Leaf], Head]:
        tree = CompactRange(head.size, head.subtrees)
        if tree.root() != head.root:
            raise AuditVerificationError("the audit database is damaged: its head does not match its tree")
        leaf_hash = hash_leaf(leaf)
        tree.append(leaf_hash)
        placed[:] = [
            Leaf(index=head.size, leaf=leaf, leaf_hash=leaf_hash, type=entry_type.value, request_id=None)
        ]
        return placed, Head.of(tree)

    store.append_behind(store.head().size, make)
    return placed[0].index
