"""Tree arithmetic agrees with RFC 6962 and with a naive recursion; see also `test_vectors`."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit.merkle import (
    EMPTY_ROOT,
    CompactRange,
    HashTree,
    hash_leaf,
    root_from_leaf_hashes,
    verify_consistency,
)
from appliance.errors import AuditVerificationError
from tests.tree_proofs import (
    Levels,
    consistency_proof,
    inclusion_proof,
    log_consistency_proof,
    verify_inclusion,
)

# The eight leaves and roots that Certificate Transparency implementations have tested with since RFC 6962.
LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
HASHES = [hash_leaf(number.to_bytes(2)) for number in range(300)]
SIZES = range(1, 131)
PAIRED_SIZES = [*range(1, 67), 127, 128, 129, 130]


def _naive_root(leaf_hashes):
    """Section 2.1 of RFC 6962, word for word."""
    if len(leaf_hashes) == 1:
        return leaf_hashes[0]
    split = 1
    while split * 2 < len(leaf_hashes):
        split *= 2
    left, right = _naive_root(leaf_hashes[:split]), _naive_root(leaf_hashes[split:])
    return hashlib.sha256(b"\x01" + left + right).digest()


def test_the_empty_tree_has_the_hash_of_nothing():
    """RFC 6962: the hash of an empty list is the hash of an empty string."""
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert CompactRange().root() == EMPTY_ROOT == root_from_leaf_hashes([])


def test_known_roots():
    """Every size of the well-known eight-leaf tree has its well-known root."""
    tree = CompactRange()
    for leaf, root in zip(LEAVES, ROOTS, strict=True):
        tree.append(hash_leaf(leaf))
        assert tree.root().hex() == root


@given(st.integers(1, 300))
def test_growing_equals_the_naive_recursion(size):
    """Appending one by one gives the root that the definition gives."""
    tree = CompactRange()
    for leaf_hash in HASHES[:size]:
        tree.append(leaf_hash)
    assert tree.root() == _naive_root(HASHES[:size])
    assert CompactRange(tree.size, tree.subtrees).root() == tree.root()


def test_a_copy_grows_on_its_own():
    """What is tried on a copy leaves the original as it was."""
    tree = CompactRange()
    for leaf_hash in HASHES[:7]:
        tree.append(leaf_hash)
    root, copy = tree.root(), tree.copy()
    copy.append(HASHES[7])
    assert (tree.size, tree.root()) == (7, root)
    assert copy.root() == _naive_root(HASHES[:8])


def test_subtrees_that_do_not_fit_the_size_are_refused():
    """A stored head that was tampered with is not silently continued."""
    with pytest.raises(AuditVerificationError):
        CompactRange(3, HASHES[:1])
    with pytest.raises(AuditVerificationError):
        CompactRange(-1)


def test_every_inclusion_proof_verifies():
    """For all sizes to 130: the proof verifies, for every entry or every seventh, and for no other leaf."""
    for size in SIZES:
        root = root_from_leaf_hashes(HASHES[:size])
        for index in [*range(0, size, 1 if size in PAIRED_SIZES else 7), size - 1]:
            proof = inclusion_proof(HASHES, index, size)
            verify_inclusion(leaf_hash=HASHES[index], index=index, size=size, proof=proof, root=root)
        with pytest.raises(AuditVerificationError):
            verify_inclusion(leaf_hash=HASHES[299], index=size - 1, size=size, proof=proof, root=root)


def test_every_consistency_proof_verifies():
    """For all old sizes, to 66 and around 128: the proof verifies, and not for another old root."""
    roots = [root_from_leaf_hashes(HASHES[:size]) for size in range(131)]
    for new in PAIRED_SIZES:
        for old in range(1, new + 1):
            proof = log_consistency_proof(HASHES, old, new)
            verify_consistency(
                old_size=old, new_size=new, old_root=roots[old], new_root=roots[new], proof=proof
            )
            if old < new:
                with pytest.raises(AuditVerificationError):
                    verify_consistency(
                        old_size=old, new_size=new, old_root=HASHES[299], new_root=roots[new], proof=proof
                    )


@given(st.integers(2, 130), st.data())
def test_a_proof_with_any_flipped_bit_is_refused(size, data):
    """No bit of a proof is without meaning."""
    index = data.draw(st.integers(0, size - 1))
    root = root_from_leaf_hashes(HASHES[:size])
    proof = inclusion_proof(HASHES, index, size)
    at = data.draw(st.integers(0, len(proof) * 256 - 1))
    node = bytearray(proof[at // 256])
    node[at % 256 // 8] ^= 1 << at % 8
    proof[at // 256] = bytes(node)
    with pytest.raises(AuditVerificationError):
        verify_inclusion(leaf_hash=HASHES[index], index=index, size=size, proof=proof, root=root)


def test_proofs_of_missing_entries_are_refused():
    """Asking for an entry or size beyond the tree is an error, not a wrong proof."""
    for index, size in ((-1, 1), (1, 1), (0, 0), (0, 301)):
        with pytest.raises(AuditVerificationError):
            inclusion_proof(HASHES, index, size)
    for old, new in ((0, 1), (2, 1), (1, 301)):
        with pytest.raises(AuditVerificationError):
            log_consistency_proof(HASHES, old, new)


def test_proofs_from_stored_tiles_read_a_few_tiles_whatever_the_size():
    """Three levels of tiles: roots, paths and proofs are the defined ones, from two tiles of each level."""
    hashes = [hash_leaf(number.to_bytes(4)) for number in range(3 * 65536 + 3 * 256 + 3)]
    levels = Levels(hashes)
    for size in (65535, 65536, 65537, 131071, 196608, len(hashes) - 3, len(hashes)):
        tree = HashTree(size, levels)
        expected = CompactRange()
        for leaf_hash in hashes[:size]:
            expected.append(leaf_hash)
        assert tree.compact().subtrees == expected.subtrees
        for index in (0, 255, 256, 65535 - 256, 65534, size // 2, size - 1):
            levels.reads.clear()
            fresh = HashTree(size, levels)
            proof = fresh.inclusion_proof(index)
            assert len(levels.reads) <= 2 * len(levels.levels)
            assert max(levels.reads) <= 256
            verify_inclusion(
                leaf_hash=hashes[index], index=index, size=size, proof=proof, root=expected.root()
            )
        for old in (1, 255, 256, 257, 65535, size // 2, size - 1):
            levels.reads.clear()
            proof = HashTree(size, levels).consistency_proof(old)
            assert len(levels.reads) <= 2 * len(levels.levels)
            assert proof == consistency_proof(hashes, old, size)


def test_a_missing_hash_is_an_error_and_no_wrong_proof():
    levels = Levels([hash_leaf(number.to_bytes(4)) for number in range(1000)])
    del levels.levels[1][2]
    for make in (HashTree(1000, levels).root, lambda: HashTree(1000, levels).inclusion_proof(0)):
        with pytest.raises(AuditVerificationError, match="level 1 are missing"):
            make()
