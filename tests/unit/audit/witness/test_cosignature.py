"""Cosignatures are those of C2SP tlog-cosignature: made as specified, and refused when a byte differs."""

import base64
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit import verify
from appliance.audit.checkpoint import (
    Checkpoint,
    Cosignature,
    NoteSignature,
    encode_body,
    parse_note,
    parse_verifier_key,
    parse_verifier_keys,
    sign_note,
    signature_lines,
    signed_message,
    verify_checkpoint,
    verify_cosignatures,
    with_signatures,
)
from appliance.audit.cosignature import (
    ED25519_COSIGNATURE,
    MAX_TIME,
    MLDSA44,
    ed25519_message,
    encode_timestamped,
    mldsa_message,
    parse_timestamped,
)
from appliance.audit.signing_keys import MldsaSigner, Signer
from appliance.errors import AuditKeyError, AuditVerificationError, MalformedCheckpointError
from tests.signers import joined

TIME = 1_679_315_147
REFUSALS = (AuditVerificationError, MalformedCheckpointError)

# Published examples of C2SP at commit 5ba5ee83: signed-note.md, "Example", and tlog-cosignature.md.
FOO_KEY = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
FOO_NOTE = (
    "This is an example message.\n\n\u2014 example.com/foo "
    "Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=\n"
)
SOFA_NOTE = (
    "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
    "\u2014 example.com/behind-the-sofa "
    "Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
    "\u2014 witness.example.com/w1 jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2"
    "oyin1nPZqhf5nNo0xUe+mbIUBkBIfZ+qnA==\n"
)
SOFA_MESSAGE = (
    "cosignature/v1\ntime 1679315147\nexample.com/behind-the-sofa\n20852163\n"
    "CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n"
)


@pytest.fixture(scope="module")
def ed25519():
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    return Signer("witness.test/e", key, kind=ED25519_COSIGNATURE)


@pytest.fixture(scope="module")
def mldsa():
    return MldsaSigner("witness.test/m", MLDSA44PrivateKey.from_seed_bytes(bytes(32)))


@pytest.fixture
def checkpoint(signer):
    return Checkpoint(origin=signer.name, size=70_000, root=bytes(range(32)))


@pytest.fixture
def note(signer, checkpoint):
    return sign_note(encode_body(checkpoint), [signer])


@pytest.fixture
def cosigned(note, ed25519, mldsa):
    return note + signature_lines(parse_note(note).text, [ed25519, mldsa], time=TIME)


def test_the_published_note_verifies_with_the_published_key():
    """Key, key id and signature of the specification's example are ours, too; one byte less is not."""
    key = parse_verifier_key(FOO_KEY)
    note = parse_note(FOO_NOTE)
    (line,) = note.signatures
    assert (line.name, line.key_id) == (key.name, key.key_id)
    assert signed_message(key, note.text, 0) == b"This is an example message.\n"
    theirs = verify.parse_key(FOO_KEY)
    assert verify.times_signed(*verify.split_note(FOO_NOTE.encode()), theirs) == [0]
    with pytest.raises(verify.InvalidError):
        verify.times_signed(*verify.split_note(FOO_NOTE.replace("an", "a").encode()), theirs)


def test_the_published_cosignature_reads_as_specified():
    """Its time is the one the specification prints, and what is signed is what it prints."""
    note = parse_note(SOFA_NOTE)
    log, witness = note.signatures
    time, signature = parse_timestamped(witness.signature, ED25519_COSIGNATURE)
    assert (time, len(signature), len(log.signature)) == (TIME, 64, 64)
    assert encode_timestamped(time, signature) == witness.signature
    assert ed25519_message(time=time, text=note.text) == SOFA_MESSAGE.encode()


def test_the_mldsa_message_is_the_specified_structure():
    """Field by field as in `cosigned_message`, packed by other means."""
    message = mldsa_message(name="w.test/1", time=TIME, origin="log.test/a", size=300, root=bytes(range(32)))
    assert message == (
        b"subtree/v1\n\0"
        + struct.pack(">B8s", 8, b"w.test/1")
        + struct.pack(">Q", TIME)
        + struct.pack(">B10s", 10, b"log.test/a")
        + struct.pack(">QQ32s", 0, 300, bytes(range(32)))
    )


def test_key_ids_name_the_type(ed25519, mldsa):
    """The same public key as a log's and as a witness's are two keys."""
    log = Signer("witness.test/e", Ed25519PrivateKey.from_private_bytes(bytes(32)))
    assert log.verifier_key.public_key == ed25519.verifier_key.public_key
    assert log.verifier_key.key_id != ed25519.verifier_key.key_id
    for signer in (log, ed25519, mldsa):
        line = signer.verifier_key.encode()
        assert parse_verifier_key(line) == signer.verifier_key
        assert verify.parse_key(line).line == line
        assert verify.parse_key(line).key_id == signer.verifier_key.key_id


def test_keys_are_read_one_a_line(ed25519, mldsa):
    """Comments and empty lines are for people; a file without keys is an error."""
    lines = [signer.verifier_key.encode() for signer in (ed25519, mldsa)]
    text = f"# witnesses\n\n{lines[0]}\n  {lines[1]}  \n"
    assert parse_verifier_keys(text) == (ed25519.verifier_key, mldsa.verifier_key)
    with pytest.raises(AuditKeyError, match="no verifier key"):
        parse_verifier_keys("# nothing\n")


@given(st.integers(0, MAX_TIME), st.sampled_from([ED25519_COSIGNATURE, MLDSA44]), st.randoms())
def test_timestamped_signatures_round_trip(time, kind, chance):
    """What is written is read back."""
    signature = chance.randbytes(64 if kind == ED25519_COSIGNATURE else 2420)
    assert parse_timestamped(encode_timestamped(time, signature), kind) == (time, signature)


@pytest.mark.parametrize("time", [-1, MAX_TIME + 1])
def test_a_time_out_of_bounds_is_not_signed(time):
    """2^63 and beyond, or before 1970, is no time."""
    with pytest.raises(MalformedCheckpointError, match="seconds"):
        encode_timestamped(time, bytes(64))


@pytest.mark.parametrize("content", [b"", bytes(7), bytes(71), bytes(73), b"\xff" * 72])
def test_another_length_is_no_cosignature(content):
    """Neither too short, nor too long, nor with a time beyond 2^63."""
    with pytest.raises(MalformedCheckpointError):
        parse_timestamped(content, ED25519_COSIGNATURE)


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_a_name_that_does_not_fit_is_not_signed(name):
    """ML-DSA-44 messages have one byte for the length of a name."""
    with pytest.raises(MalformedCheckpointError, match="255"):
        mldsa_message(name=name, time=1, origin="log.test/a", size=1, root=bytes(32))


def test_cosignatures_name_witness_and_time(cosigned, ed25519, mldsa, signer, checkpoint):
    """Both algorithms, together with the log's own signature."""
    keys = (ed25519.verifier_key, mldsa.verifier_key)
    assert verify_cosignatures(cosigned, keys) == (
        Cosignature(name="witness.test/e", kind=ED25519_COSIGNATURE, time=TIME),
        Cosignature(name="witness.test/m", kind=MLDSA44, time=TIME),
    )
    assert verify_checkpoint(cosigned, signer.verifier_key) == checkpoint


def test_the_verifier_sees_the_same_cosignatures(cosigned, ed25519, mldsa, signer):
    """Two implementations agree on what was stated."""
    keys = tuple(verify.parse_key(other.verifier_key.encode()) for other in (ed25519, mldsa))
    report = verify.Report(subject="test", origin=signer.name, witnesses=verify.Witnesses(keys=keys))
    assert verify.see_cosignatures(report, cosigned.encode()).size == 70_000
    assert {name: seen.time for name, seen in report.cosigned.items()} == dict.fromkeys(
        ("witness.test/e", "witness.test/m"), TIME
    )


def test_cosignatures_of_unknown_witnesses_do_not_count(cosigned, note):
    """Strangers are ignored; without known witnesses there is no statement."""
    stranger = Signer("witness.test/e", Ed25519PrivateKey.generate(), kind=ED25519_COSIGNATURE)
    assert verify_cosignatures(cosigned, [stranger.verifier_key]) == ()
    assert verify_cosignatures(note, [stranger.verifier_key]) == ()


def test_a_log_key_is_no_witness(signer, note):
    """A plain signature (type 01) states no time, so it is no cosignature."""
    assert verify_cosignatures(note, [signer.verifier_key]) == ()


def test_a_cosignature_without_a_time_is_no_witness(note, mldsa):
    """Time zero is allowed, and says nothing about the largest tree seen."""
    silent = note + signature_lines(parse_note(note).text, [mldsa], time=0)
    assert verify_cosignatures(silent, [mldsa.verifier_key]) == ()


def test_every_changed_character_is_refused_or_proves_nothing(note, ed25519, signer):
    """A change of text or signature is an error; a change of name or key id makes a stranger of it."""
    known = [ed25519.verifier_key]
    stranger = Signer("witness.test/s", Ed25519PrivateKey.generate(), kind=ED25519_COSIGNATURE)
    cosigned = note + signature_lines(parse_note(note).text, [ed25519, stranger], time=TIME)
    for at in range(len(cosigned)):
        for other in ("A", "B", "\n", " ", ""):
            changed = cosigned[:at] + other + cosigned[at + 1 :]
            if changed == cosigned:
                continue
            try:
                verify_checkpoint(changed, signer.verifier_key)
                statements = verify_cosignatures(changed, known)
            except REFUSALS:
                continue
            # It still verifies, so what was changed belongs to the other witness's line, or made one of it.
            body, _, lines = changed.rpartition("\n\n")
            assert body == cosigned.rpartition("\n\n")[0]
            mine = cosigned.splitlines(keepends=True)[5]
            assert (mine in lines.splitlines(keepends=True)) == bool(statements), at


@pytest.mark.parametrize("kind", [ED25519_COSIGNATURE, MLDSA44])
def test_every_changed_bit_of_a_cosignature_is_refused(note, ed25519, mldsa, kind):
    """Time and signature: no byte of either is without meaning."""
    witness = ed25519 if kind == ED25519_COSIGNATURE else mldsa
    text = parse_note(note).text
    content = witness.sign_text(text, TIME)
    step = 1 if kind == ED25519_COSIGNATURE else 7  # every byte of 2428 would take a while
    for at in [*range(8), *range(8, len(content), step)]:
        changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        line = base64.b64encode(witness.verifier_key.key_id + changed).decode()
        with pytest.raises(AuditVerificationError, match="does not match"):
            verify_cosignatures(f"{note}\u2014 {witness.verifier_key.name} {line}\n", [witness.verifier_key])


def test_a_cosignature_of_another_checkpoint_is_refused(note, checkpoint, ed25519, mldsa, signer):
    """Lines cannot be moved from one checkpoint to another."""
    other = encode_body(Checkpoint(origin=signer.name, size=checkpoint.size, root=bytes(32)))
    for witness in (ed25519, mldsa):
        moved = note + signature_lines(other, [witness], time=TIME)
        with pytest.raises(AuditVerificationError, match="does not match"):
            verify_cosignatures(moved, [witness.verifier_key])


def test_an_mldsa_cosignature_is_of_one_name(note, mldsa):
    """The structure names the signer: the same key under another name did not sign it."""
    renamed = MldsaSigner("witness.test/x", mldsa._private_key)
    content = base64.b64encode(renamed.verifier_key.key_id + mldsa.sign_text(parse_note(note).text, TIME))
    with pytest.raises(AuditVerificationError):
        verify_cosignatures(f"{note}\u2014 witness.test/x {content.decode()}\n", [renamed.verifier_key])


def test_mldsa_signs_checkpoints_only(mldsa):
    """Another text has no place in its structure."""
    with pytest.raises(MalformedCheckpointError):
        mldsa.sign_text("any text\n", TIME)


def test_a_log_can_sign_with_both_algorithms(checkpoint, signer, mldsa):
    """Each key verifies alone and with the other; a missing one is missed."""
    post_quantum = MldsaSigner(signer.name, mldsa._private_key)
    both = joined(signer, post_quantum)
    note = sign_note(encode_body(checkpoint), both.signers, time=TIME)
    assert both.vkey.split("\n") == [signer.vkey, post_quantum.verifier_key.encode()]
    for keys in (both.verifier_keys, both.verifier_keys[:1], both.verifier_keys[1:]):
        assert verify_checkpoint(note, *keys) == checkpoint
    only_one = sign_note(encode_body(checkpoint), [signer])
    with pytest.raises(AuditVerificationError, match="ML-DSA-44"):
        verify_checkpoint(only_one, *both.verifier_keys)
    with pytest.raises(AuditVerificationError, match="without a key"):
        verify_checkpoint(note)


def test_lines_are_added_once(note, cosigned):
    """Merging what two witnesses answered repeats nothing and loses nothing."""
    lines = cosigned.rpartition("\n\n")[2].splitlines(keepends=True)
    assert with_signatures(note, lines) == cosigned
    assert with_signatures(cosigned, [*lines, *lines]) == cosigned


def test_signature_lines_are_parts_of_notes(cosigned, ed25519):
    """What a witness answers is what a note's parser reads."""
    line = parse_note(cosigned).signatures[1]
    assert isinstance(line, NoteSignature)
    assert (line.name, line.key_id) == (ed25519.name, ed25519.verifier_key.key_id)
