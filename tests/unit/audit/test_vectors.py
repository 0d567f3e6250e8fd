"""
Every published proof vector, good and corrupted, judged by the writer's arithmetic and by the verifier's.

`tests/data/merkle-vectors.json` is the test data of transparency-dev/merkle, unchanged but for being
one file; it names the commit.
"""

import base64
import json
from pathlib import Path

import pytest

from appliance.audit import merkle, verify
from appliance.errors import AuditVerificationError
from tests.tree_proofs import inclusion_proof, log_consistency_proof, verify_inclusion

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "merkle-vectors.json").read_text())
INCLUSION, CONSISTENCY = VECTORS["inclusion"], VECTORS["consistency"]
# The eight leaves all of the vectors are about: those of the first Certificate Transparency tests.
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


def _bytes(text):
    return base64.b64decode(text or "", validate=True)


def _nodes(texts):
    return [_bytes(text) for text in texts or ()]


def _refused(error, check, **arguments):
    try:
        check(**arguments)
    except error:
        return True
    return False


def test_the_vectors_are_all_there():
    """98 of each kind, most of them corrupted on purpose."""
    assert (len(INCLUSION), len(CONSISTENCY)) == (98, 98)
    for vectors in (INCLUSION, CONSISTENCY):
        wrong = sum(vector["wantErr"] for vector in vectors.values())
        assert 80 < wrong < 98


@pytest.mark.parametrize("name", INCLUSION)
def test_inclusion_as_the_writer_sees_it(name):
    """A good proof passes and a corrupted one does not."""
    vector = INCLUSION[name]
    refused = _refused(
        AuditVerificationError,
        verify_inclusion,
        leaf_hash=_bytes(vector["leafHash"]),
        index=vector["leafIdx"],
        size=vector["treeSize"],
        proof=_nodes(vector["proof"]),
        root=_bytes(vector["root"]),
    )
    assert refused == vector["wantErr"], vector["desc"]


@pytest.mark.parametrize("name", INCLUSION)
def test_inclusion_as_the_verifier_sees_it(name):
    """The verifier's own code, which shares nothing with the writer's, comes to the same verdict."""
    vector = INCLUSION[name]
    try:
        path = [verify._hash(text) for text in vector["proof"] or ()]
        root, leaf_hash = verify._hash(vector["root"] or ""), verify._hash(vector["leafHash"] or "")
        refused = verify.root_from_path(leaf_hash, vector["leafIdx"], vector["treeSize"], path) != root
    except verify.InvalidError:
        refused = True
    assert refused == vector["wantErr"], vector["desc"]


@pytest.mark.parametrize("name", CONSISTENCY)
def test_consistency_as_the_writer_sees_it(name):
    """A good proof passes and a corrupted one does not."""
    vector = CONSISTENCY[name]
    refused = _refused(
        AuditVerificationError,
        merkle.verify_consistency,
        old_size=vector["size1"],
        new_size=vector["size2"],
        old_root=_bytes(vector["root1"]),
        new_root=_bytes(vector["root2"]),
        proof=_nodes(vector["proof"]),
    )
    assert refused == vector["wantErr"], vector["desc"]


def test_consistency_as_the_verifier_sees_it():
    """
    The verifier has the leaves, so it computes both roots and needs no proof.

    It agrees with every pair of heads the vectors call consistent, and with none they falsified.
    """
    roots = _roots()
    for name, vector in CONSISTENCY.items():
        heads = [(vector["size1"], _bytes(vector["root1"])), (vector["size2"], _bytes(vector["root2"]))]
        agrees = all(size <= len(LEAVES) and roots[size] == root for size, root in heads)
        if not vector["wantErr"] and heads[0] != heads[1]:
            assert agrees, name
        elif "root" in name and "preceding" not in name and "trailing" not in name and heads[0] != heads[1]:
            assert not agrees, name


def test_the_tree_of_the_vectors_is_the_tree_of_the_writer():
    """Roots of the eight leaves are the same by both implementations, and are those in the vectors."""
    roots = _roots()
    tree = merkle.CompactRange()
    for size, leaf in enumerate(LEAVES, start=1):
        tree.append(merkle.hash_leaf(leaf))
        assert tree.root() == roots[size]
    good = [one for one in INCLUSION.values() if not one["wantErr"] and one["treeSize"] > 1]
    assert len(good) > 3
    assert all(roots[vector["treeSize"]] == _bytes(vector["root"]) for vector in good)


def test_the_vectors_proofs_are_the_ones_we_make():
    """For every good vector our own proof is the published one, hash by hash."""
    hashes = [merkle.hash_leaf(leaf) for leaf in LEAVES]
    for vector in INCLUSION.values():
        if not vector["wantErr"]:
            made = inclusion_proof(hashes, vector["leafIdx"], vector["treeSize"])
            assert made == _nodes(vector["proof"])
    for vector in CONSISTENCY.values():
        if not vector["wantErr"] and vector["size1"] < vector["size2"]:
            made = log_consistency_proof(hashes, vector["size1"], vector["size2"])
            assert made == _nodes(vector["proof"])


def _roots():
    tree = verify.Tree()
    roots = [tree.root()]
    for leaf in LEAVES:
        tree.append(verify.hash_leaf(leaf))
        roots.append(tree.root())
    return roots
