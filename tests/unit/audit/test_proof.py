"""A receipt proves one entry, permanently and offline, and nothing else."""

import pytest

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note
from appliance.audit.entry import Entry, encode, format_time, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import hash_leaf, root_from_leaf_hashes
from appliance.audit.verify import ExitCode, parse_key, verify_receipt
from appliance.errors import AuditVerificationError
from tests.tree_proofs import make_receipt

READING = {"actor": "cli:root", "operation": "tail"}
LEAVES = [
    encode(
        Entry(
            log="appliance.test/audit",
            id=new_entry_id(number, bytes(10)),
            type=EntryType.AUDIT_READ,
            time=format_time(number),
            fields=READING,
        )
    )
    for number in range(11)
]
HASHES = [hash_leaf(leaf) for leaf in LEAVES]


def verdict(signer, text: str, leaf: bytes) -> ExitCode:
    """The verifier's verdict on a receipt and its leaf."""
    return verify_receipt(text.encode(), leaf, parse_key(signer.vkey), None).exit_code


@pytest.fixture
def note(signer):
    checkpoint = Checkpoint(origin=signer.name, size=11, root=root_from_leaf_hashes(HASHES))
    return sign_note(encode_body(checkpoint), [signer])


@pytest.fixture
def text(note):
    return make_receipt(leaf_hashes=HASHES, index=6, checkpoint=note)


def test_receipts_verify_for_every_entry(signer, note):
    """Each entry's receipt shows that entry, and not the one before it."""
    for index, leaf in enumerate(LEAVES):
        text = make_receipt(leaf_hashes=HASHES, index=index, checkpoint=note)
        assert verdict(signer, text, leaf) is ExitCode.VALID
        assert verdict(signer, text, LEAVES[index - 1]) is ExitCode.INVALID


def test_a_receipt_reads_as_specified(text, note):
    """Header, index, path, empty line, checkpoint."""
    lines = text.split("\n")
    assert lines[:2] == ["c2sp.org/tlog-proof@v1", "index 6"]
    assert text.endswith(f"\n\n{note}")
    assert len(lines[2].encode()) == 44


def test_every_changed_character_is_refused(signer, text):
    """No character of a receipt is without meaning."""
    for at in range(len(text)):
        for other in ("A", "7", "\n", ""):
            changed = text[:at] + other + text[at + 1 :]
            if changed != text:
                assert verdict(signer, changed, LEAVES[6]) is ExitCode.INVALID


def test_every_changed_byte_of_the_leaf_is_refused(signer, text):
    """The receipt is for exactly these bytes."""
    for at in range(len(LEAVES[6])):
        leaf = bytearray(LEAVES[6])
        leaf[at] ^= 1
        assert verdict(signer, text, bytes(leaf)) is ExitCode.INVALID


def test_an_extra_line_means_nothing(signer, text):
    """The specification allows unsigned extra data; it is ignored, and allowed only in its place."""
    header, _, rest = text.partition("\n")
    assert verdict(signer, f"{header}\nextra aGVsbG8=\n{rest}", LEAVES[6]) is ExitCode.VALID
    twice = f"{header}\nextra aGVsbG8=\nextra aGVsbG8=\n{rest}"
    assert verdict(signer, twice, LEAVES[6]) is ExitCode.INVALID


def test_no_receipt_for_an_entry_the_checkpoint_does_not_cover(note):
    """An entry after the checkpoint has to wait for the next one."""
    with pytest.raises(AuditVerificationError):
        make_receipt(leaf_hashes=[*HASHES, *HASHES], index=11, checkpoint=note)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "c2sp.org/tlog-proof@v1\n\n", "c2sp.org/tlog-proof@v1\nindex 00\n\n"]
)
def test_malformed_receipts_are_invalid(signer, text):
    """The verifier reports a verdict, not a traceback."""
    assert verdict(signer, text, LEAVES[6]) is ExitCode.INVALID
