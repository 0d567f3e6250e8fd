"""
Our tree, the verifier's tree and the definition agree on every size to 1,000.

The reference below is section 2.1 of RFC 6962 word for word, slow on purpose.  What another
implementation computes from the same leaves is pinned below: see decision 0013.
"""

import hashlib
import random
from functools import cache

import pytest

from appliance.audit import verify
from appliance.audit.merkle import (
    CompactRange,
    hash_leaf,
    root_from_leaf_hashes,
    verify_consistency,
)
from tests.tree_proofs import inclusion_proof, log_consistency_proof, verify_inclusion

LARGEST = 1000
ENTRIES = [number.to_bytes(2) for number in range(LARGEST)]
HASHES = [hash_leaf(entry) for entry in ENTRIES]
# Small sizes, and one below, at and above each power of two: where trees change their shape.
AROUND = [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 767, 999, 1000]
ROOTS_DIGEST = "0ec08b4a73ca51913edae807449d6979b6253f690cd06792c63625d724aaf3fa"
"""SHA-256 over the roots of sizes 0 to 1,000, as two other implementations compute them."""


def _k(n):
    """The largest power of two smaller than n."""
    k = 1
    while k * 2 < n:
        k *= 2
    return k


@cache
def mth(start, end):
    """MTH(D[start:end])."""
    n = end - start
    if n == 0:
        return hashlib.sha256(b"").digest()
    if n == 1:
        return hashlib.sha256(b"\x00" + ENTRIES[start]).digest()
    k = _k(n)
    return hashlib.sha256(b"\x01" + mth(start, start + k) + mth(start + k, end)).digest()


def path(m, start, end):
    """PATH(m, D[start:end]), m counted from start."""
    n = end - start
    if n == 1:
        return []
    k = _k(n)
    if m < k:
        return [*path(m, start, start + k), mth(start + k, end)]
    return [*path(m - k, start + k, end), mth(start, start + k)]


def subproof(m, start, end, *, is_whole):
    """SUBPROOF(m, D[start:end], b), m counted from start."""
    n = end - start
    if m == n:
        return [] if is_whole else [mth(start, end)]
    k = _k(n)
    if m <= k:
        return [*subproof(m, start, start + k, is_whole=is_whole), mth(start + k, end)]
    return [*subproof(m - k, start + k, end, is_whole=False), mth(start, start + k)]


@pytest.fixture(scope="module")
def roots():
    """The definition's roots of sizes 0 to 1,000."""
    return [mth(0, size) for size in range(LARGEST + 1)]


def test_every_root_is_the_one_of_the_definition(roots):
    """Both trees, grown leaf by leaf, have the defined root at every size."""
    ours, theirs = CompactRange(), verify.Tree()
    assert ours.root() == theirs.root() == roots[0]
    for size, leaf_hash in enumerate(HASHES, start=1):
        ours.append(leaf_hash)
        theirs.append(leaf_hash)
        assert ours.root() == theirs.root() == roots[size], size
    assert root_from_leaf_hashes(HASHES) == roots[LARGEST]


def test_every_root_is_the_one_other_implementations_have(roots):
    """A misreading of the RFC shared by all code here would show in this number."""
    assert hashlib.sha256(b"".join(roots)).hexdigest() == ROOTS_DIGEST


def test_inclusion_proofs_of_every_size_are_the_defined_ones(roots):
    """The last entry and another of each size; both verifiers accept each proof."""
    chance = random.Random(6962)
    for size in range(1, LARGEST + 1):
        for index in {size - 1, chance.randrange(size)}:
            proof = inclusion_proof(HASHES, index, size)
            assert proof == path(index, 0, size), (index, size)
            verify_inclusion(leaf_hash=HASHES[index], index=index, size=size, proof=proof, root=roots[size])
            assert verify.root_from_path(HASHES[index], index, size, proof) == roots[size]


def test_every_entry_of_some_trees_has_the_defined_proof(roots):
    """All entries, at sizes where the tree changes its shape."""
    for size in (1, 2, 3, 7, 8, 9, 64, 65, 127, 129, 257):
        for index in range(size):
            proof = inclusion_proof(HASHES, index, size)
            assert proof == path(index, 0, size), (index, size)
            assert verify.root_from_path(HASHES[index], index, size, proof) == roots[size]


def test_consistency_proofs_of_all_pairs_are_the_defined_ones(roots):
    """All pairs of sizes around powers of two; each proof is accepted for its pair of roots."""
    for new in AROUND:
        for old in (size for size in AROUND if size <= new):
            proof = log_consistency_proof(HASHES, old, new)
            assert proof == subproof(old, 0, new, is_whole=True), (old, new)
            verify_consistency(
                old_size=old, new_size=new, old_root=roots[old], new_root=roots[new], proof=proof
            )


def test_a_proof_fits_no_other_index_or_size(roots):
    """A proof of one entry proves no other entry, and no larger or smaller tree."""
    chance = random.Random(9162)
    for _ in range(300):
        size = chance.randrange(2, LARGEST)
        index = chance.randrange(size)
        proof = inclusion_proof(HASHES, index, size)
        other = chance.choice([number for number in (index - 1, index + 1, index ^ 2) if 0 <= number < size])
        assert _verifiers_root(HASHES[index], other, size, proof) != roots[size]
        for wrong_size in (size - 1, size + 1):
            assert _verifiers_root(HASHES[index], index, wrong_size, proof) != roots[wrong_size]


def _verifiers_root(leaf_hash, index, size, proof):
    try:
        return verify.root_from_path(leaf_hash, index, size, proof)
    except verify.InvalidError:
        return None
