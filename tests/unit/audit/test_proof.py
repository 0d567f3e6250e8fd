"""A receipt proves one entry, for good and offline, and nothing else."""

import pytest

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note
from appliance.audit.merkle import hash_leaf, root_from_leaf_hashes
from appliance.audit.proof import LogProof, encode_proof, make_proof, parse_proof, verify_proof
from appliance.errors import AuditVerificationError, MalformedCheckpointError

LEAVES = [f"leaf {number}".encode() for number in range(11)]
HASHES = [hash_leaf(leaf) for leaf in LEAVES]
REFUSALS = (AuditVerificationError, MalformedCheckpointError)


@pytest.fixture
def note(signer):
    checkpoint = Checkpoint(origin=signer.name, size=11, root=root_from_leaf_hashes(HASHES))
    return sign_note(encode_body(checkpoint), [signer])


@pytest.fixture
def text(note):
    return encode_proof(make_proof(leaf_hashes=HASHES, index=6, checkpoint=note))


def test_receipts_verify_for_every_entry(signer, note):
    """Each entry's receipt shows that entry, and not its neighbour."""
    for index, leaf in enumerate(LEAVES):
        text = encode_proof(make_proof(leaf_hashes=HASHES, index=index, checkpoint=note))
        assert verify_proof(text, leaf, signer.verifier_key).size == 11
        with pytest.raises(AuditVerificationError):
            verify_proof(text, LEAVES[index - 1], signer.verifier_key)


def test_a_receipt_reads_as_specified(text, note):
    """Header, index, path, empty line, checkpoint."""
    lines = text.split("\n")
    assert lines[:2] == ["c2sp.org/tlog-proof@v1", "index 6"]
    assert text.endswith(f"\n\n{note}")
    assert len(lines[2].encode()) == 44


def test_receipts_round_trip(text):
    """Reading and writing gives the same text."""
    assert isinstance(parse_proof(text), LogProof)
    assert encode_proof(parse_proof(text)) == text


def test_every_changed_character_is_refused(signer, text):
    """No character of a receipt is without meaning."""
    for at in range(len(text)):
        for other in ("A", "7", "\n", ""):
            changed = text[:at] + other + text[at + 1 :]
            if changed != text:
                with pytest.raises(REFUSALS):
                    verify_proof(changed, LEAVES[6], signer.verifier_key)


def test_every_changed_byte_of_the_leaf_is_refused(signer, text):
    """The receipt is for exactly these bytes."""
    for at in range(len(LEAVES[6])):
        leaf = bytearray(LEAVES[6])
        leaf[at] ^= 1
        with pytest.raises(AuditVerificationError):
            verify_proof(text, bytes(leaf), signer.verifier_key)


def test_an_extra_line_means_nothing(signer, text):
    """The specification allows unsigned extra data; it is dropped, and only in its place."""
    header, _, rest = text.partition("\n")
    assert verify_proof(f"{header}\nextra aGVsbG8=\n{rest}", LEAVES[6], signer.verifier_key)
    with pytest.raises(AuditVerificationError):
        verify_proof(f"{header}\nextra aGVsbG8=\nextra aGVsbG8=\n{rest}", LEAVES[6], signer.verifier_key)


def test_no_receipt_for_an_entry_the_checkpoint_does_not_cover(note):
    """An entry after the checkpoint has to wait for the next one."""
    with pytest.raises(AuditVerificationError):
        make_proof(leaf_hashes=[*HASHES, *HASHES], index=11, checkpoint=note)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "c2sp.org/tlog-proof@v1\n\n", "c2sp.org/tlog-proof@v1\nindex 00\n\n"]
)
def test_what_is_no_receipt_is_refused(text):
    """Nothing but our errors comes out of a malformed receipt."""
    with pytest.raises(AuditVerificationError):
        parse_proof(text)
