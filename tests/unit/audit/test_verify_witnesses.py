"""Options of the verifier's command line: several keys, witnesses, and how many are needed."""

import base64
import json
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

from appliance.audit import verify
from appliance.audit.checkpoint import Checkpoint, encode_body, parse_note, sign_note, signature_lines
from appliance.audit.cosignature import ED25519_COSIGNATURE
from appliance.audit.entry import Entry, encode, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.export import tile_path
from appliance.audit.merkle import hash_leaf, root_from_leaf_hashes
from appliance.audit.signing_keys import MldsaSigner, Signer
from appliance.audit.verify import ExitCode
from tests.signers import joined
from tests.tree_proofs import make_receipt

TIME = 1_763_640_000


@pytest.fixture(scope="module")
def witness():
    return Signer("w.test/1", Ed25519PrivateKey.from_private_bytes(b"w" * 32), kind=ED25519_COSIGNATURE)


@pytest.fixture(scope="module")
def post_quantum_witness():
    first = Signer("w.test/2", Ed25519PrivateKey.from_private_bytes(b"x" * 32), kind=ED25519_COSIGNATURE)
    return joined(first, MldsaSigner("w.test/2", MLDSA44PrivateKey.from_seed_bytes(b"x" * 32)))


@pytest.fixture
def leaves(signer):
    def leaf(number):
        return encode(
            Entry(
                log=signer.name,
                id=new_entry_id(number, number.to_bytes(10)),
                type=EntryType.AUDIT_READ,
                time="2026-11-20T12:00:00.000Z",
                fields={"actor": "cli:root", "operation": "tail"},
            )
        )

    return [leaf(number) for number in range(6)]


@pytest.fixture
def head(signer, leaves):
    root = root_from_leaf_hashes(hash_leaf(leaf) for leaf in leaves)
    return encode_body(Checkpoint(origin=signer.name, size=len(leaves), root=root))


@pytest.fixture
def write(tmp_path, leaves):
    """Write an export whose checkpoint is this note."""

    def write_(note):
        directory = tmp_path / "export"
        for level, content in (
            ("entries", b"".join(len(leaf).to_bytes(2) + leaf for leaf in leaves)),
            ("0", b"".join(map(hash_leaf, leaves))),
        ):
            path = directory / tile_path(level, 0, len(leaves))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (directory / "checkpoint").write_text(note)
        return directory

    return write_


@pytest.fixture
def run(capsys):
    """Run the command line; return exit code, report or error."""

    def run_(*arguments):
        try:
            code = verify.main([*map(str, arguments), "--json"])
        except SystemExit as error:
            code = error.code
        output = capsys.readouterr()
        return code, json.loads(output.out) if output.out else output.err

    return run_


def test_witnesses_in_the_newest_checkpoint_count(
    write, run, head, signer, witness, post_quantum_witness, tmp_path
):
    """Keys as text, in a file, in one option or several; every key of a witness is needed."""
    note = sign_note(head, [signer]) + signature_lines(
        head, [witness, *post_quantum_witness.signers], time=TIME
    )
    directory = write(note)
    file = tmp_path / "second.keys"
    file.write_text(f"# second\n{post_quantum_witness.vkey}\n")
    arguments = (directory, "--key", signer.vkey, "--witness", witness.vkey, "--witness", file)
    code, report = run(*arguments)
    assert (code, report["witnesses_needed"], report["witnessed_size"]) == (0, 2, 6)
    assert report["witnesses"] == {
        name: {"size": 6, "time": "2025-11-20T12:00:00Z"} for name in ("w.test/1", "w.test/2")
    }
    # Without its ML-DSA-44 signature the second witness has not cosigned, if both keys are required.
    write("".join(f"{line}\n" for line in note.split("\n")[:-2]))
    assert run(*arguments)[0] == ExitCode.UNWITNESSED
    assert run(*arguments, "--witnesses-needed", 1)[0] == ExitCode.VALID
    only_first = post_quantum_witness.vkey.split("\n")[0]
    assert run(directory, "--key", signer.vkey, "--witness", only_first)[0] == ExitCode.VALID


def test_a_wrong_signature_of_a_named_witness_makes_the_log_invalid(write, run, head, signer, witness):
    """A wrong signature of a known key means that the checkpoint was altered."""
    content = base64.b64encode(witness.verifier_key.key_id + TIME.to_bytes(8) + bytes(64)).decode()
    directory = write(f"{sign_note(head, [signer])}\u2014 w.test/1 {content}\n")
    assert run(directory, "--key", signer.vkey)[0] == ExitCode.VALID
    code, report = run(directory, "--key", signer.vkey, "--witness", witness.vkey)
    assert (code, report["problems"]) == (
        ExitCode.INVALID,
        ["the checkpoint's signature of w.test/1 is wrong"],
    )


def test_every_key_that_is_given_must_have_signed(write, run, head, signer, tmp_path):
    """Two algorithms, one a line or each its own option."""
    other = MldsaSigner(signer.name, MLDSA44PrivateKey.from_seed_bytes(bytes(32)))
    both = joined(signer, other)
    file = tmp_path / "log.keys"
    file.write_text(f"{both.vkey}\n")
    for signers, expected in (
        (both.signers, ExitCode.VALID),
        ([signer], ExitCode.INVALID),
        ([other], ExitCode.INVALID),
    ):
        directory = write(sign_note(head, signers, time=TIME))
        assert run(directory, "--key", file)[0] == expected
        assert run(directory, "--key", signer.vkey, "--key", other.verifier_key.encode())[0] == expected


def test_every_changed_bit_of_a_post_quantum_checkpoint_is_refused(write, head, signer):
    """Of the text, of the time, of the signature."""
    both = joined(signer, MldsaSigner(signer.name, MLDSA44PrivateKey.from_seed_bytes(bytes(32))))
    note = sign_note(head, both.signers, time=TIME).encode()
    keys = verify.parse_keys(both.vkey)
    assert verify.verify_note(note, keys).size == 6
    for at in [*range(300), *range(300, len(note), 7)]:
        with pytest.raises(verify.InvalidError):
            verify.verify_note(note[:at] + bytes([note[at] ^ 1]) + note[at + 1 :], keys)


def test_every_changed_byte_of_a_cosigned_receipt_is_refused_or_unwitnessed(head, signer, witness, leaves):
    """A changed name or key id makes the witness unknown; everything else is invalid."""
    note = sign_note(head, [signer]) + signature_lines(head, [witness], time=TIME)
    hashes = [hash_leaf(leaf) for leaf in leaves]
    text = make_receipt(leaf_hashes=hashes, index=3, checkpoint=note).encode()
    key = verify.parse_key(signer.vkey)
    witnesses = verify.Witnesses(keys=verify.parse_keys(witness.vkey), needed=1)
    report = verify.verify_receipt(text, leaves[3], key, None, witnesses)
    assert (report.exit_code, report.witnessed_size) == (ExitCode.VALID, 6)
    for at in range(len(text)):
        changed = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
        report = verify.verify_receipt(changed, leaves[3], key, None, witnesses)
        assert report.exit_code in {ExitCode.INVALID, ExitCode.UNWITNESSED}, at


def test_a_held_checkpoint_needs_one_of_the_keys(write, run, head, signer, tmp_path):
    """It may be from before the second key, or from after the first one was rotated."""
    both = joined(signer, MldsaSigner(signer.name, MLDSA44PrivateKey.from_seed_bytes(bytes(32))))
    directory = write(sign_note(head, both.signers, time=TIME))
    held = tmp_path / "held"
    held.write_text(sign_note(head, [signer]))
    keys = ("--key", both.vkey.split("\n")[0], "--key", both.vkey.split("\n")[1])
    code, report = run(directory, *keys, "--held", held)
    assert (code, report["held"]) == (ExitCode.VALID, "continues the held checkpoint of 6 entries")
    unknown = Signer(signer.name, Ed25519PrivateKey.generate())
    held.write_text(sign_note(head, [unknown]))
    assert run(directory, *keys, "--held", held)[0] == ExitCode.UNUSABLE


def test_the_log_is_not_its_own_witness(write, run, head, signer, witness):
    """A plain log key as witness, more witnesses than there are, keys of two logs: nothing is verified."""
    directory = write(sign_note(head, [signer]))
    other = Signer("other.test/audit", Ed25519PrivateKey.generate())
    for arguments, words in (
        (("--key", signer.vkey, "--witness", signer.vkey), "type 01"),
        (("--key", signer.vkey, "--witness", witness.vkey, "--witnesses-needed", 2), "cannot be needed"),
        (("--key", signer.vkey, "--witnesses-needed", 1), "cannot be needed"),
        (("--key", signer.vkey, "--key", other.vkey), "one log"),
        (("--key", signer.vkey, "--witness", "nowhere"), "cannot read"),
    ):
        code, error = run(directory, *arguments)
        assert code == ExitCode.UNUSABLE
        assert words in error


def test_an_older_library_is_one_line(monkeypatch):
    """Ed25519 needs nothing new; a post-quantum key says what is missing."""
    key = MldsaSigner("log.test/a", MLDSA44PrivateKey.from_seed_bytes(bytes(32))).verifier_key.encode()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.mldsa", None)
    with pytest.raises(verify.UnusableError, match="47 or newer"):
        verify.parse_key(key)
    assert parse_note(sign_note("a\n", [Signer("log.test/a", Ed25519PrivateKey.generate())])).signatures


def test_a_time_beyond_the_calendar_is_shown_all_the_same():
    """A witness's clock can be at any time."""
    assert verify._show_time(2**62) == f"{2**62} s after 1970"
