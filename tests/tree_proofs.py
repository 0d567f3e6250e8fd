"""Merkle proofs for tests: made as RFC 6962 defines them, and verified."""

from collections.abc import Sequence

from appliance.audit.export import make_receipt as make_receipt_from
from appliance.audit.merkle import TILE_WIDTH, HashTree, hash_node, root_from_leaf_hashes
from appliance.errors import AuditVerificationError


def consistency_proof(leaf_hashes: Sequence[bytes], old: int, new: int) -> list[bytes]:
    """PROOF(old, D[new]) of RFC 6962, section 2.1.2, for 0 < old <= new."""
    return _subproof(leaf_hashes[:new], old, is_whole=True)


def _subproof(leaf_hashes: Sequence[bytes], old: int, *, is_whole: bool) -> list[bytes]:
    if old == len(leaf_hashes):
        return [] if is_whole else [root_from_leaf_hashes(leaf_hashes)]
    middle = 1 << (len(leaf_hashes) - 1).bit_length() - 1
    left, right = leaf_hashes[:middle], leaf_hashes[middle:]
    if old <= middle:
        return [*_subproof(left, old, is_whole=is_whole), root_from_leaf_hashes(right)]
    return [*_subproof(right, old - middle, is_whole=False), root_from_leaf_hashes(left)]


class Levels:
    """Hashes by level, as a store has them, made anew from leaf hashes."""

    def __init__(self, leaf_hashes: Sequence[bytes]) -> None:
        self.levels = [list(leaf_hashes)]
        while len(below := self.levels[-1]) >= TILE_WIDTH:
            full = range(0, len(below) - TILE_WIDTH + 1, TILE_WIDTH)
            self.levels.append([root_from_leaf_hashes(below[at : at + TILE_WIDTH]) for at in full])
        self.reads: list[int] = []
        """How many hashes each read returned."""

    def __call__(self, level: int, start: int, end: int) -> list[bytes]:
        found = self.levels[level][start:end] if level < len(self.levels) else []
        self.reads.append(len(found))
        return found


def inclusion_proof(leaf_hashes: Sequence[bytes], index: int, size: int) -> list[bytes]:
    """The proof as the log makes it."""
    return HashTree(size, Levels(leaf_hashes)).inclusion_proof(index)


def log_consistency_proof(leaf_hashes: Sequence[bytes], old: int, new: int) -> list[bytes]:
    """The same proof as the log makes it."""
    return HashTree(new, Levels(leaf_hashes)).consistency_proof(old)


def make_receipt(*, leaf_hashes: Sequence[bytes], index: int, checkpoint: str) -> str:
    """The receipt as the log makes it."""
    return make_receipt_from(hashes=Levels(leaf_hashes), index=index, checkpoint=checkpoint)


def verify_inclusion(*, leaf_hash: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Check that the leaf is entry `index` of the tree (RFC 9162, 2.1.3.2); raises AuditVerificationError."""
    if not 0 <= index < size or any(len(node) != 32 for node in (leaf_hash, *proof)):
        raise AuditVerificationError(f"malformed inclusion proof for entry {index} of {size}")
    position, last, node = index, size - 1, leaf_hash
    for sibling in proof:
        if not last:
            raise AuditVerificationError("the inclusion proof is too long")
        if position & 1 or position == last:
            node = hash_node(sibling, node)
            while position and not position & 1:
                position, last = position >> 1, last >> 1
        else:
            node = hash_node(node, sibling)
        position, last = position >> 1, last >> 1
    if last or node != root:
        raise AuditVerificationError(
            f"the proof does not show that entry {index} is in the tree of size {size}"
        )
