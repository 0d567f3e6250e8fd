"""The audit log: whether it can be signed, and whether its content is what was signed."""

from collections.abc import Iterable
from contextlib import closing

from appliance.audit.checkpoint import verify_checkpoint
from appliance.audit.merkle import HashTree, hash_leaf
from appliance.audit.recovery import check_tail
from appliance.audit.sealed import SealedHead
from appliance.audit.signing_keys import Signer, load_signing_key, refuse_retired
from appliance.audit.store import SqlAuditStore
from appliance.cli.preflight.audit_database import log_is_current
from appliance.cli.preflight.check import Check, Inquiry, SkippedError, Subject, family
from appliance.errors import ApplianceError, AuditVerificationError
from appliance.infra.key_location import TokenKey

KEY = Subject("audit.key", "Signing key")
NEWEST = Subject("audit.newest", "Newest entries")
HOW_TO = "see docs/how-to/keep-signing-keys-in-a-token.md"


@family(KEY, NEWEST)
def check_log(inquiry: Inquiry) -> Iterable[Check]:
    """Load the key, and read the end of the log; nothing is written."""
    inquiry.require_gateway()
    installation, settings = inquiry.installation, inquiry.settings.audit
    key = installation.signing_key
    begun = isinstance(key, TokenKey) or key.exists() or installation.sealed_head.exists()
    if not begun and settings.signing_key_file is None:
        yield KEY.ok("none yet; the first start creates one")
        raise SkippedError("there is no log yet")
    try:
        signer = load_signing_key(key, settings.origin)
        refuse_retired(signer, installation.retired_keys)
    except ApplianceError as error:
        own = "restore the log's own key: another key would start another log"
        yield KEY.fail(str(error), HOW_TO if isinstance(key, TokenKey) else own)
        raise SkippedError("there is no key to verify it") from error
    kinds = "Ed25519 and ML-DSA-44" if len(signer.verifier_keys) > 1 else "Ed25519"
    place = f"; in the token {key.token}, it signs" if isinstance(key, TokenKey) else ""
    yield KEY.ok(f"{kinds}, for {signer.name}{place}")
    if not log_is_current(inquiry):
        raise SkippedError("there is no log yet, or its tables must be upgraded first")
    try:
        yield check_newest(inquiry, signer)
    except ApplianceError as error:
        yield NEWEST.fail(str(error), "do not start it: see docs/runbooks/audit-not-verifiable.md")


def check_newest(inquiry: Inquiry, signer: Signer) -> Check:
    """
    Verify the newest signatures and entries of a log with current tables.

    Raises AuditVerificationError if the log is not what was signed, ApplianceError if it cannot be read.
    """
    with closing(SqlAuditStore(inquiry.installation.database_url)) as store:
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
        for checkpoint in signed:
            if HashTree(checkpoint.size, store.hashes).root() != checkpoint.root:
                raise AuditVerificationError(
                    f"the first {checkpoint.size} entries are not those that were signed"
                )
        start = max(0, head.size - inquiry.entries)
        for leaf in store.leaves(start, head.size):
            if hash_leaf(leaf.leaf) != leaf.leaf_hash:
                raise AuditVerificationError(f"entry {leaf.index} is not what was recorded")
        check_tail(store, head, head.size)
    if not head.size:
        return NEWEST.skipped("the log is empty")
    newest_signed = max((checkpoint.size for checkpoint in signed), default=0)
    return NEWEST.ok(
        f"{head.size - start} of {head.size} hashed, {newest_signed} signed, the tree is the signed one; "
        "`appliance audit verify` reads all of them"
    )
