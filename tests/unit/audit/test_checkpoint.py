"""Checkpoints are C2SP signed notes: as other implementations make them, and refused if a byte differs."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit.checkpoint import (
    Checkpoint,
    Note,
    encode_body,
    is_key_name,
    parse_body,
    parse_note,
    parse_verifier_key,
    sign_note,
    verify_checkpoint,
)
from appliance.audit.signing_keys import Signer
from appliance.errors import AuditKeyError, AuditVerificationError, MalformedCheckpointError

REFUSALS = (AuditVerificationError, MalformedCheckpointError)

# The example of golang.org/x/mod/sumdb/note, whose format C2SP signed-note specifies.
GO_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_SEED = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
GO_TEXT = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
)
GO_NOTE = (
    f"{GO_TEXT}\n\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfq"
    "dngotpRZb6KE6RyyBwJnAM=\n"
)


@pytest.fixture
def checkpoint(signer):
    return Checkpoint(origin=signer.name, size=70_000, root=bytes(range(32)))


@pytest.fixture
def note(signer, checkpoint):
    return sign_note(encode_body(checkpoint), [signer])


def test_notes_are_those_of_another_implementation():
    """Key, key id and signature equal the published example, byte for byte."""
    signer = Signer("PeterNeumann", Ed25519PrivateKey.from_private_bytes(GO_SEED))
    assert signer.vkey == GO_KEY
    assert sign_note(GO_TEXT, [signer]) == GO_NOTE
    assert parse_note(GO_NOTE).text == GO_TEXT
    assert parse_verifier_key("sum.golang.org+033de0ae+Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8")


def test_a_signed_checkpoint_verifies(signer, checkpoint, note):
    """The verified checkpoint equals the signed one."""
    assert verify_checkpoint(note, parse_verifier_key(signer.vkey)) == checkpoint


@given(st.integers(0, 2**62), st.binary(min_size=32, max_size=32))
def test_bodies_round_trip(size, root):
    """Every checkpoint survives its text form."""
    checkpoint = Checkpoint(origin="log.test/a", size=size, root=root)
    assert parse_body(encode_body(checkpoint)) == checkpoint


def test_every_changed_character_is_refused(signer, note):
    """Each character of a signed checkpoint matters."""
    key = signer.verifier_key
    for at in range(len(note)):
        for other in ("A", "B", "\n", " ", ""):
            changed = note[:at] + other + note[at + 1 :]
            if changed != note:
                with pytest.raises(REFUSALS):
                    verify_checkpoint(changed, key)


def test_every_truncation_is_refused(signer, note):
    """A part of a checkpoint is refused."""
    for length in range(len(note)):
        with pytest.raises(REFUSALS):
            verify_checkpoint(note[:length], signer.verifier_key)


def test_signatures_of_unknown_keys_are_kept_and_ignored(signer, checkpoint, note):
    """A witness may add its line without harm; alone it proves nothing."""
    witness = Signer("witness.test", Ed25519PrivateKey.generate())
    both = sign_note(encode_body(checkpoint), [witness, signer])
    assert [line.name for line in parse_note(both).signatures] == ["witness.test", signer.name]
    assert verify_checkpoint(both, signer.verifier_key) == checkpoint
    with pytest.raises(AuditVerificationError, match="no signature"):
        verify_checkpoint(sign_note(encode_body(checkpoint), [witness]), signer.verifier_key)


def test_a_key_of_the_same_name_does_not_pass(signer, checkpoint):
    """The name alone is not trusted."""
    impostor = Signer(signer.name, Ed25519PrivateKey.generate())
    with pytest.raises(AuditVerificationError):
        verify_checkpoint(sign_note(encode_body(checkpoint), [impostor]), signer.verifier_key)


def test_wrong_signature_next_to_a_right_one_is_refused(signer, checkpoint, note):
    """A known key never signs wrongly: such a note was tampered with."""
    signature = base64.b64encode(signer.verifier_key.key_id + bytes(64)).decode()
    with pytest.raises(AuditVerificationError, match="does not match"):
        verify_checkpoint(f"{note}\u2014 {signer.name} {signature}\n", signer.verifier_key)


def test_a_checkpoint_of_another_log_is_refused(signer):
    """A key signs for the log it is named after, and for no other."""
    other = Checkpoint(origin="other.test/audit", size=1, root=bytes(32))
    with pytest.raises(AuditVerificationError, match=r"other\.test"):
        verify_checkpoint(sign_note(encode_body(other), [signer]), signer.verifier_key)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "log\n1\n",
        "log\n01\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n",
        "log\n-1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n",
        "log\n１\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n",  # noqa: RUF001 - a digit, not ASCII
        "log\n1\nAAAA\n",
        "log\n1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAB=\n",
        "log\n1\nnot base64!\n",
        "log\n1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\nextension\n",
        "\n1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n",
        "log\n1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
    ],
)
def test_malformed_checkpoints_are_refused(text):
    """Leading zeros, other digits, loose base64 and extra lines are errors, not variants."""
    with pytest.raises(MalformedCheckpointError):
        parse_body(text)


@given(st.text(max_size=300))
def test_parsing_any_text_raises_only_our_errors(text):
    """For any text, with anything around it."""
    for candidate in (text, f"{text}\n\n\u2014 {text}\n", f"a\n\n\u2014 name {text}\n"):
        try:
            assert isinstance(parse_note(candidate), Note)
        except MalformedCheckpointError:
            continue


@given(st.text(max_size=100))
def test_parsing_any_key_raises_only_our_error(text):
    """Keys come from people; every mistake is one error with one line."""
    for candidate in (text, f"name+00000000+{text}", f"{text}+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/"):
        with pytest.raises(AuditKeyError):
            parse_verifier_key(candidate)


def test_every_changed_character_of_a_key_is_refused():
    """A mistyped key is noticed, not used."""
    for at in range(len(GO_KEY)):
        changed = GO_KEY[:at] + ("A" if GO_KEY[at] != "A" else "B") + GO_KEY[at + 1 :]
        with pytest.raises(AuditKeyError):
            parse_verifier_key(changed)


@pytest.mark.parametrize("material", [b"\x02" + bytes(32), b"\x06" + bytes(32), b"\x01" + bytes(1312)])
def test_a_key_of_another_algorithm_is_refused_by_name(material):
    """Types other than Ed25519 and ML-DSA-44 exist, and a type has one length."""
    with pytest.raises(AuditKeyError, match="Ed25519"):
        parse_verifier_key(f"log.test+00000000+{base64.b64encode(material).decode()}")


def test_key_names_have_no_spaces_controls_or_plus():
    """What would break a signature line cannot be a name."""
    assert is_key_name("appliance.local/audit")
    for name in ("", "a b", "a+b", "a\nb", "a\u2003b", "a\tb", "a\x01b"):
        assert not is_key_name(name)
