"""
Receipts: one text file that proves, offline and for good, that an entry is in the log.

Format: C2SP `tlog-proof`: the entry's index, its inclusion path and the signed checkpoint it leads
to.  The leaf itself travels beside the file.  Pure.  Source: c2sp.org/tlog-proof@v1.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.audit.checkpoint import Checkpoint, VerifierKey, parse_body, parse_note, verify_checkpoint
from appliance.audit.merkle import HASH_BYTES, hash_leaf, inclusion_proof, verify_inclusion
from appliance.errors import AuditVerificationError

HEADER = "c2sp.org/tlog-proof@v1"
MAX_PATH = 63

_INDEX = re.compile(r"index (0|[1-9][0-9]{0,18})")
_EXTRA = re.compile(r"extra [A-Za-z0-9+/]*={0,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProof:
    """A receipt: which entry, its path to the root, and the checkpoint that names the root."""

    index: int
    path: tuple[bytes, ...]
    checkpoint: str
    """Signed note, verbatim."""


def make_proof(*, leaf_hashes: Sequence[bytes], index: int, checkpoint: str) -> LogProof:
    """
    Return the receipt of entry `index` under a signed checkpoint that covers it.

    Raises:
        AuditVerificationError: the checkpoint does not cover the entry.
        MalformedCheckpointError: the text is no checkpoint.
    """
    size = parse_body(parse_note(checkpoint).text).size
    path = tuple(inclusion_proof(leaf_hashes, index, size))
    return LogProof(index=index, path=path, checkpoint=checkpoint)


def encode_proof(proof: LogProof) -> str:
    """Return the text of a receipt."""
    lines = [HEADER, f"index {proof.index}", *(base64.b64encode(node).decode("ascii") for node in proof.path)]
    return "\n".join(lines) + f"\n\n{proof.checkpoint}"


def parse_proof(text: str) -> LogProof:
    """
    Read a receipt, without judging it.

    An `extra` line is allowed and dropped: it is not signed, so nothing may depend on it.

    Raises:
        AuditVerificationError: it is no receipt.
    """
    head, blank, checkpoint = text.partition("\n\n")
    header, *lines = head.split("\n")
    if lines and _EXTRA.fullmatch(lines[0]):
        del lines[0]
    match = _INDEX.fullmatch(lines[0]) if lines else None
    if header != HEADER or not blank or match is None or len(lines) > 1 + MAX_PATH:
        raise AuditVerificationError(
            f"a receipt is `{HEADER}`, an index, a path, an empty line and a checkpoint"
        )
    path = tuple(_parse_hash(line) for line in lines[1:])
    return LogProof(index=int(match[1]), path=path, checkpoint=checkpoint)


def verify_proof(text: str, leaf: bytes, verifier_key: VerifierKey) -> Checkpoint:
    """
    Return the checkpoint, once it is certain that it covers exactly this leaf at the receipt's index.

    Raises:
        AuditVerificationError: the receipt does not show it.
        MalformedCheckpointError: the checkpoint in it is not one.
    """
    proof = parse_proof(text)
    checkpoint = verify_checkpoint(proof.checkpoint, verifier_key)
    verify_inclusion(
        leaf_hash=hash_leaf(leaf),
        index=proof.index,
        size=checkpoint.size,
        proof=proof.path,
        root=checkpoint.root,
    )
    return checkpoint


def _parse_hash(line: str) -> bytes:
    try:
        node = base64.b64decode(line, validate=True)
    except ValueError:
        node = b""
    if len(node) != HASH_BYTES or base64.b64encode(node).decode("ascii") != line:
        raise AuditVerificationError("a receipt's path has one base64 SHA-256 hash per line")
    return node
