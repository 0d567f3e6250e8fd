"""The audit log: whether it can be signed, and whether its content is what was signed."""

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.audit.checkpoint import Checkpoint, verify_checkpoint
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.sealed import SealedHead
from appliance.audit.signing_keys import Signer, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.cli.preflight.audit_database import log_is_current
from appliance.cli.preflight.check import Check, Subject
from appliance.cli.preflight.inquiry import Inquiry
from appliance.errors import ApplianceError, AuditVerificationError

KEY = Subject("audit.key", "Signing key")
NEWEST = Subject("audit.newest", "Newest entries")
SUBJECTS = (KEY, NEWEST)
MAX_REBUILT_ENTRIES = 200_000
"""Maximum size of a log whose tree is rebuilt from its hashes, which takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLog:
    """Findings of a valid log; an invalid one is an error."""

    size: int
    """Entries in the log."""
    signed: int
    """Entries covered by the newest checkpoint."""
    read: int
    """Newest entries whose content was hashed."""
    rebuilt: bool
    """Whether the tree over all entries was rebuilt."""


def check_log(inquiry: Inquiry) -> Iterable[Check]:
    """Load the key, and read the end of the log; nothing is written."""
    installation = inquiry.installation
    if not inquiry.gateway:
        yield from (subject.skipped("no gateway runs on this machine") for subject in SUBJECTS)
        return
    begun = installation.sealed_head.exists()
    if (
        not installation.signing_key.exists()
        and not begun
        and inquiry.settings.audit.signing_key_file is None
    ):
        yield KEY.ok("none yet; the first start creates one")
        yield NEWEST.skipped("there is no log yet")
        return
    try:
        signer = load_signing_key(installation.signing_key, inquiry.settings.audit.origin)
    except ApplianceError as error:
        yield KEY.fail(str(error), "restore the log's own key: another key would start another log")
        yield NEWEST.skipped("there is no key to verify it")
        return
    kinds = "Ed25519 and ML-DSA-44" if len(signer.verifier_keys) > 1 else "Ed25519"
    yield KEY.ok(f"{kinds}, for {signer.name}")
    if not log_is_current(inquiry):
        yield NEWEST.skipped("there is no log yet, or its tables must be upgraded first")
        return
    try:
        seen = read_newest(inquiry, signer)
    except ApplianceError as error:
        yield NEWEST.fail(str(error), "do not start it: see docs/runbooks/audit-not-verifiable.md")
    else:
        yield judge_newest(seen)


def read_newest(inquiry: Inquiry, signer: Signer) -> SeenLog:
    """
    Verify the newest signatures and entries of a log with current tables.

    Raises:
        AuditVerificationError: the log is not what was signed.
        ApplianceError: it cannot be read.
    """
    store = SqlAuditStore(inquiry.installation.database_url)
    try:
        sealed = SealedHead(inquiry.installation.sealed_head).read()
        newest = store.latest_checkpoint()
        # Read last: a gateway that runs meanwhile makes it larger, never smaller.
        head = store.head()
        signed = [
            verify_checkpoint(note, signer.verifier_key) for note in (sealed, newest and newest.note) if note
        ]
        for checkpoint in signed:
            if checkpoint.size > head.size:
                raise AuditVerificationError(
                    f"the log has {head.size} entries, and {checkpoint.size} were signed: it is an older copy"
                )
        start = max(0, head.size - inquiry.entries)
        for leaf in store.leaves(start, head.size):
            if hash_leaf(leaf.leaf) != leaf.leaf_hash:
                raise AuditVerificationError(f"entry {leaf.index} is not what was recorded")
        if CompactRange(head.size, head.subtrees).root() != head.root:
            raise AuditVerificationError("the head of the log is inconsistent")
        rebuilt = head.size <= MAX_REBUILT_ENTRIES
        if rebuilt:
            _rebuild(store, head.size, head.root, signed)
        return SeenLog(
            size=head.size,
            signed=max((checkpoint.size for checkpoint in signed), default=0),
            read=head.size - start,
            rebuilt=rebuilt,
        )
    finally:
        store.close()


def judge_newest(seen: SeenLog) -> Check:
    if not seen.size:
        return NEWEST.skipped("the log is empty")
    text = f"{seen.read} of {seen.size} hashed, {seen.signed} signed"
    if not seen.rebuilt:
        return NEWEST.ok(f"{text}; `appliance audit verify` reads all of them")
    return NEWEST.ok(f"{text}, the tree over all entries matches the signed one")


def _rebuild(store: SqlAuditStore, size: int, root: bytes, signed: Iterable[Checkpoint]) -> None:
    wanted = {checkpoint.size: checkpoint.root for checkpoint in signed}
    tree = CompactRange()
    for leaf_hash in store.leaf_hashes(size):
        tree.append(leaf_hash)
        expected = wanted.pop(tree.size, None)
        if expected is not None and tree.root() != expected:
            raise AuditVerificationError(f"the first {tree.size} entries are not those that were signed")
    if tree.root() != root:
        raise AuditVerificationError("the entries of the log do not match its head")
