"""
Checks at start that the stored log was not rolled back, in a time that does not depend on its size.

The root is computed from the newest hashes of each level of the tree, and compared with the head and with
the checkpoints that were signed earlier.  Leaves are read, and hashed again, from the tile of the newest
signature on.  What is older is left to `appliance.audit.durability.selfcheck`.  Other gateways may append
meanwhile: the log is checked as it was when its head was read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.audit.checkpoint import Checkpoint, VerifierKey, verify_checkpoint
from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import TILE_WIDTH, CompactRange, HashTree, hash_leaf
from appliance.audit.store import AuditStore, Head, Leaf, OpenRequest
from appliance.errors import (
    AuditEntryError,
    AuditRollbackError,
    AuditVerificationError,
    MalformedCheckpointError,
)

_REMEDY = "do not delete anything; restore the newer database, or start a new log under a new origin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    tree: CompactRange
    signed_size: int
    """Size of the newest checkpoint that was ever signed; 0 for none."""
    joins: bool
    """Whether this gateway never wrote this log: the head has to be sealed before it does."""
    open_requests: tuple[OpenRequest, ...]
    """Requests without an outcome: in flight, or left by a gateway that stopped."""


def recover(store: AuditStore, sealed_note: str | None, verifier_key: VerifierKey, gateway: str) -> Recovered:
    """
    Check the stored log against itself and against what was signed before.

    A gateway that never wrote a shared log may join it without a sealed head of its own.

    Raises AuditRollbackError if it is older than a signed checkpoint or another history,
    AuditVerificationError if head and leaves do not belong together or a checkpoint is forged,
    AuditUnavailableError if it is not readable.
    """
    latest = store.latest_checkpoint()
    joins = store.shared and gateway not in store.writers()
    if latest and sealed_note is None and not joins:
        raise AuditRollbackError(f"the log has signed checkpoints, but its sealed head is missing: {_REMEDY}")
    notes = [("sealed head", sealed_note), ("latest checkpoint", latest.note if latest else None)]
    signed = [_verified(name, note, verifier_key) for name, note in notes if note is not None]
    head = store.head()
    check_disposal(store)
    if store.leaves(head.size, head.size + 1) and store.head() == head:
        raise _damaged(head, "there are more")
    for checkpoint in signed:
        _check_signed(store, head, checkpoint)
    signed_size = max((checkpoint.size for checkpoint in signed), default=0)
    return Recovered(
        tree=check_tail(store, head, signed_size),
        signed_size=signed_size,
        joins=joins and sealed_note is None,
        open_requests=tuple(store.open_requests()),
    )


def _verified(name: str, note: str, verifier_key: VerifierKey) -> Checkpoint:
    try:
        return verify_checkpoint(note, verifier_key)
    except (AuditVerificationError, MalformedCheckpointError) as error:
        raise AuditVerificationError(f"the log's {name} was not signed with this key: {error}") from error


def check_disposal(store: AuditStore) -> None:
    """Raise AuditVerificationError unless an entry says what the store says was disposed of."""
    disposal = store.disposal()
    if not disposal.below:
        return
    found = [leaf.leaf for leaf in store.leaves(disposal.index, disposal.index + 1)]
    try:
        entry = decode(found[0]) if found else None
    except AuditEntryError:
        entry = None
    is_recorded = entry is not None and entry.type is EntryType.AUDIT_DISPOSED
    if entry is None or not is_recorded or entry.fields["below"] != disposal.below:
        raise AuditVerificationError(
            f"the audit database is damaged: no entry disposes of {disposal.below} entries: {_REMEDY}"
        )


def _check_signed(store: AuditStore, head: Head, checkpoint: Checkpoint) -> None:
    if checkpoint.size % TILE_WIDTH and checkpoint.size < store.disposal().below:
        raise AuditRollbackError(
            f"{checkpoint.size} entries were signed here, and the newest of them were disposed of since: "
            "this gateway has not run for too long to check the log; give it a new data directory"
        )
    if checkpoint.size > head.size:
        raise AuditRollbackError(
            f"the log has {head.size} entries, but {checkpoint.size} were signed: {_REMEDY}"
        )
    if _root_at(store, checkpoint.size) != checkpoint.root:
        raise AuditRollbackError(
            f"the first {checkpoint.size} entries are not the ones that were signed: {_REMEDY}"
        )


def _root_at(store: AuditStore, size: int) -> bytes | None:
    try:
        return HashTree(size, store.hashes).root()
    except AuditVerificationError:
        return None  # hashes are missing


def check_tail(store: AuditStore, head: Head, signed_size: int) -> CompactRange:
    """
    Return the tree of `head`, made of stored hashes up to the tile of the newest signature, then of leaves.

    Raises AuditVerificationError if it is another than the head says, or than the stored hashes make.
    """
    newest = min(signed_size, head.size - 1)
    start = max(0, newest - newest % TILE_WIDTH)
    try:
        tree = HashTree(start, store.hashes).compact()
        for at in range(start, head.size, TILE_WIDTH):
            _extend(tree, store.leaves(at, min(at + TILE_WIDTH, head.size)))
        computed, stored = Head.of(tree), HashTree(head.size, store.hashes).compact()
    except AuditVerificationError as error:
        raise _damaged(head, str(error)) from error
    if (head, head.subtrees) != (computed, computed.subtrees) or stored.subtrees != head.subtrees:
        raise _damaged(head, "their hashes make another")
    return tree


def _extend(tree: CompactRange, leaves: Sequence[Leaf]) -> None:
    for leaf in leaves:
        if leaf.index != tree.size or hash_leaf(leaf.leaf) != leaf.leaf_hash:
            raise AuditVerificationError(f"entry {tree.size} is missing or was altered")
        tree.append(leaf.leaf_hash)


def _damaged(head: Head, found: str) -> AuditVerificationError:
    return AuditVerificationError(
        f"the audit database is damaged: its head (size {head.size}) does not match its leaves ({found}): "
        f"{_REMEDY}"
    )
