"""
Receipts: one text file that proves offline that an entry is in the log; `appliance.audit.verify` reads it.

Format: C2SP `tlog-proof`: the entry's index, its inclusion path and the signed checkpoint it leads to.  The
leaf is a file of its own.  Pure.  Source: c2sp.org/tlog-proof@v1.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.audit.checkpoint import parse_body, parse_note
from appliance.audit.merkle import inclusion_proof

HEADER = "c2sp.org/tlog-proof@v1"


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
