"""
Checks at start that the stored log is complete and was not rolled back.

The root is recomputed from every leaf hash and compared with the head and with the checkpoints that were
signed earlier.  That takes about a microsecond per entry.  The bytes of the leaves are left to
`appliance.audit.verify`.  Other gateways may append meanwhile: the log is checked as it was when its head
was read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.audit.checkpoint import Checkpoint, VerifierKey, verify_checkpoint
from appliance.audit.merkle import CompactRange
from appliance.audit.store import AuditStore, Head, OpenRequest
from appliance.errors import AuditRollbackError, AuditVerificationError, MalformedCheckpointError

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
    if store.leaves(head.size, head.size + 1) and store.head() == head:
        raise _damaged(head, "more")
    tree = _rebuild(store, head, signed)
    return Recovered(
        tree=tree,
        signed_size=max((checkpoint.size for checkpoint in signed), default=0),
        joins=joins and sealed_note is None,
        open_requests=tuple(store.open_requests()),
    )


def _verified(name: str, note: str, verifier_key: VerifierKey) -> Checkpoint:
    try:
        return verify_checkpoint(note, verifier_key)
    except (AuditVerificationError, MalformedCheckpointError) as error:
        raise AuditVerificationError(f"the log's {name} was not signed with this key: {error}") from error


def _rebuild(store: AuditStore, head: Head, signed: Sequence[Checkpoint]) -> CompactRange:
    tree = CompactRange()
    roots = {0: tree.root()}
    wanted = {checkpoint.size for checkpoint in signed}
    for leaf_hash in store.leaf_hashes(head.size):
        tree.append(leaf_hash)
        if tree.size in wanted:
            roots[tree.size] = tree.root()
    for checkpoint in signed:
        if checkpoint.size > tree.size:
            raise AuditRollbackError(
                f"the log has {tree.size} entries, but {checkpoint.size} were signed: {_REMEDY}"
            )
        if roots[checkpoint.size] != checkpoint.root:
            raise AuditRollbackError(
                f"the first {checkpoint.size} entries are not the ones that were signed: {_REMEDY}"
            )
    computed = Head.of(tree)
    if (head, head.subtrees) != (computed, computed.subtrees):
        raise _damaged(head, str(tree.size))
    return tree


def _damaged(head: Head, leaves: str) -> AuditVerificationError:
    return AuditVerificationError(
        f"the audit database is damaged: its head (size {head.size}) does not match its {leaves} leaves: "
        f"{_REMEDY}"
    )
