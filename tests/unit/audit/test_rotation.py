"""A log changes its signing key without losing anyone who trusts the old one."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.audit import rotation, verify
from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note, verify_checkpoint
from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log, export_receipt
from appliance.audit.merkle import CompactRange
from appliance.audit.rotation import rotate_keys, rotation_message, short_form
from appliance.audit.sealed import SealedHead
from appliance.audit.signing_keys import (
    Signer,
    create_mldsa_key,
    create_signing_key,
    load_signing_key,
    mldsa_path,
)
from appliance.audit.store import SqlAuditStore, StoredCheckpoint
from appliance.audit.verify import ExitCode
from appliance.errors import AuditKeyError, AuditRollbackError

ORIGIN = "appliance.test/audit"


@pytest.fixture
def key_path(tmp_path):
    path = tmp_path / "audit.key"
    create_signing_key(path)
    return path


@pytest.fixture
def rotate(sql_store, key_path, sealed_path, clock):
    """Rotate the keys of the log."""

    def rotate_(**changed):
        arguments = {
            "store": sql_store,
            "path": key_path,
            "origin": ORIGIN,
            "sealed": SealedHead(sealed_path),
            "gateway": "gateway",
            "actor": "cli:root",
            "clock": clock,
        }
        return rotate_keys(**(arguments | changed))

    return rotate_


@pytest.fixture
def write(sql_store, key_path, open_log):
    """Open the log with the key on disk, write some entries and close it."""

    async def write_(count=3):
        async with open_log(sql_store, signed_by=load_signing_key(key_path, ORIGIN)) as log:
            for _ in range(count):
                await log.append(EntryType.AUDIT_READ, actor="cli:root", operation="tail")

    return write_


@pytest.fixture
def audit(sql_store, key_path, tmp_path):
    """Export the log and verify it with these keys."""
    count = 0

    def audit_(*keys, change=lambda directory: None):
        nonlocal count
        count += 1
        directory = tmp_path / f"export{count}"
        export_log(sql_store, directory, vkey=load_signing_key(key_path, ORIGIN).vkey)
        change(directory)
        parsed = [key for text in keys for key in verify.parse_keys(text)]
        return verify.verify_export(directory, parsed, None)

    return audit_


async def test_auditor_who_trusts_the_old_key_can_follow_to_the_new_one(write, rotate, key_path, audit):
    """Old key, new key or both: the log is valid, and the report names the successor."""
    old = load_signing_key(key_path, ORIGIN).vkey
    await write()
    rotated = rotate()
    assert rotated.signer.vkey == load_signing_key(key_path, ORIGIN).vkey != old
    for _ in range(2):
        for keys in ((old,), (rotated.signer.vkey,), (old, rotated.signer.vkey)):
            report = audit(*keys)
            assert (report.exit_code, report.problems) == (ExitCode.VALID, [])
            assert len(report.rotations) == (old in keys)
            assert ("rotated to" in verify.render(report)) == (old in keys)
            assert len(json.loads(verify.render_json(report))["rotations"]) == (old in keys)
        await write()  # from here on the new key signs alone


async def test_several_rotations_are_followed_one_by_one(write, rotate, key_path, audit):
    """An auditor with any earlier key reaches the newest."""
    keys = [load_signing_key(key_path, ORIGIN).vkey]
    for _ in range(3):
        await write()
        keys.append(rotate().signer.vkey)
    await write()
    for number, key in enumerate(keys):
        report = audit(key)
        assert report.exit_code == ExitCode.VALID
        assert len(report.rotations) == 3 - number


async def test_both_algorithms_are_rotated_together(write, rotate, key_path, audit):
    """Each key's successor is named by that key; the export contains the long one."""
    create_mldsa_key(mldsa_path(key_path))
    old = load_signing_key(key_path, ORIGIN).vkey
    await write()
    new = rotate().signer.vkey
    await write()
    assert not set(old.split("\n")) & set(new.split("\n"))
    for keys in (old, new, old.split("\n")[0], old.split("\n")[1]):
        report = audit(keys)
        assert (report.exit_code, report.problems) == (ExitCode.VALID, [])
    newest = rotate().signer.vkey
    await write()
    # The key in between is in no export any more; an auditor who kept it can follow.
    with pytest.raises(verify.UnusableError, match="give it as --key"):
        audit(old.split("\n")[1])
    assert audit(old.split("\n")[1], new.split("\n")[1]).exit_code == ExitCode.VALID
    assert audit(newest).exit_code == ExitCode.VALID


async def test_rotation_entry_holds_what_the_old_key_signed(write, rotate, key_path, sql_store):
    """Names of both keys, and a signature that verifies with the old one alone."""
    old = load_signing_key(key_path, ORIGIN)
    await write()
    rotated = rotate()
    entry = decode(sql_store.leaves(rotated.size - 1, rotated.size)[0].leaf)
    assert entry.type == EntryType.SIGNER_ROTATED
    assert entry.fields["previous_key"] == short_form(old.verifier_key) == old.vkey
    assert entry.fields["key"] == rotated.signer.vkey
    message = rotation_message(ORIGIN, old.vkey, rotated.signer.vkey)
    assert message == verify.rotation_message(ORIGIN, old.vkey, rotated.signer.vkey)
    verify.parse_key(old.vkey).check(verify._base64(entry.fields["signature"]), message)


async def test_the_bridge_is_signed_by_both_and_sealed(write, rotate, key_path, sql_store, sealed_path):
    """The checkpoint that covers the entry convinces holders of either key."""
    old = load_signing_key(key_path, ORIGIN)
    await write()
    rotated = rotate()
    for note in (sql_store.latest_checkpoint().note, sealed_path.read_text()):
        keys = (old.verifier_key, rotated.signer.verifier_key)
        assert verify_checkpoint(note, *keys).size == rotated.size == sql_store.head().size


async def test_old_key_is_kept_until_the_operator_destroys_it(write, rotate, key_path):
    """It is named, private, and no longer used."""
    content = key_path.read_bytes()
    await write()
    (retired,) = rotate().retired
    assert retired.read_bytes() == content
    assert retired.stat().st_mode & 0o777 == 0o600
    assert key_path.read_bytes() != content
    assert not list(key_path.parent.glob("*.new"))


async def test_a_log_that_the_retired_key_signs_on_is_invalid(
    write, rotate, key_path, audit, sql_store, clock
):
    """Its signature is still right, but does not count any more."""
    old = load_signing_key(key_path, ORIGIN)
    await write()
    rotate()
    head = sql_store.head()
    tree = CompactRange(head.size, head.subtrees)
    note = sign_note(encode_body(Checkpoint(origin=ORIGIN, size=head.size, root=tree.root())), [old])
    sql_store.save_checkpoint(StoredCheckpoint(size=head.size, note=note, time="2026-11-20T12:00:00.000Z"))
    report = audit(old.vkey)
    assert report.exit_code == ExitCode.INVALID
    assert "not signed" in report.problems[0]


async def test_rotation_without_the_old_keys_signature_is_invalid(
    write, key_path, rotate, audit, monkeypatch
):
    """An attacker with the database and a key of their own cannot take the log over."""
    old = load_signing_key(key_path, ORIGIN)
    await write()
    thief = Signer(ORIGIN, Ed25519PrivateKey.generate())
    monkeypatch.setattr(rotation, "_signature", lambda _, message: _sign(thief, message))
    rotate()
    await write()
    report = audit(old.vkey)
    assert report.exit_code == ExitCode.INVALID
    assert "without the old key's consent" in report.problems[0]


def _sign(signer, message):
    return verify._show_hash(signer.sign(message))


async def test_a_receipt_needs_the_key_that_signed_its_checkpoint(write, rotate, key_path, sql_store):
    """One receipt cannot show the rotation; it counts as not signed with this key."""
    old = load_signing_key(key_path, ORIGIN).vkey
    await write()
    new = rotate().signer.vkey
    await write()
    leaf, text = export_receipt(sql_store, 1)
    assert verify.verify_receipt(text.encode(), leaf, verify.parse_key(new), None).exit_code == ExitCode.VALID
    report = verify.verify_receipt(text.encode(), leaf, verify.parse_key(old), None)
    assert report.exit_code == ExitCode.INVALID


STEPS = (
    "create_mldsa_key",
    "create_signing_key",
    "_append",
    "_append",
    "SealedHead.write",
    "SqlAuditStore.save_checkpoint",
    "_replace",
    "_replace",
)


class Crash(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", range(len(STEPS)))
async def test_an_interrupted_rotation_is_completed_by_running_it_again(
    write, rotate, key_path, audit, monkeypatch, step, when
):
    """Before or after every step: no gateway starts with half a rotation, and the second run completes it."""
    create_mldsa_key(mldsa_path(key_path))
    old = load_signing_key(key_path, ORIGIN).vkey
    await write()
    with monkeypatch.context() as patch:
        _crash_at(patch, step, when)
        with pytest.raises(Crash):
            rotate()
    if key_path.with_name("audit.key.new").exists():
        with pytest.raises(AuditKeyError, match="rotate-key"):
            load_signing_key(key_path, ORIGIN)
    new = rotate().signer.vkey
    assert not list(key_path.parent.glob("*.new"))
    await write()
    finished_before = (step, when) == (len(STEPS) - 1, "after")
    report = audit(old) if not finished_before else audit(old.split("\n")[0])
    assert (report.exit_code, report.problems) == (ExitCode.VALID, [])
    assert report.entries_by_type["signer.rotated"] == (4 if finished_before else 2)
    assert audit(new).exit_code == ExitCode.VALID


def _crash_at(patch, step, when):
    """Make the `step`-th of STEPS crash, before or after it has happened."""
    name, nth = STEPS[step], STEPS[: step + 1].count(STEPS[step])
    calls = 0
    owner = {"SealedHead": SealedHead, "SqlAuditStore": SqlAuditStore}.get(name.partition(".")[0], rotation)
    attribute = name.rpartition(".")[2]
    real = getattr(owner, attribute)

    def crash(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            raise Crash
        result = real(*arguments, **named)
        if calls == nth:
            raise Crash
        return result

    patch.setattr(owner, attribute, crash)


async def test_the_new_key_is_installed_on_another_gateways_machine(
    write, rotate, key_path, sql_store, tmp_path, audit, sealed_path
):
    """Its own sealed head knows the old key only: the new key next to it is a rotation to be completed."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "audit.key").write_bytes(key_path.read_bytes())
    (other / "audit.key").chmod(0o600)
    old = load_signing_key(key_path, ORIGIN).vkey
    await write()
    (other / "audit.head").write_text(sealed_path.read_text())
    new = rotate().signer.vkey
    await write()
    (other / "audit.key.new").write_bytes(key_path.read_bytes())
    (other / "audit.key.new").chmod(0o600)
    size = sql_store.head().size
    taken = rotate(path=other / "audit.key", sealed=SealedHead(other / "audit.head"))
    assert (taken.signer.vkey, sql_store.head().size) == (new, size)
    assert audit(old).exit_code == ExitCode.VALID


async def test_a_log_that_was_rolled_back_is_not_handed_over(write, rotate, sql_store, sealed_path, key_path):
    """The rollback stays visible: a new key must not hide it."""
    await write()
    signer = load_signing_key(key_path, ORIGIN)
    ahead = sign_note(encode_body(Checkpoint(origin=ORIGIN, size=99, root=bytes(32))), [signer])
    sealed_path.write_text(ahead)
    with pytest.raises(AuditRollbackError):
        rotate()


def test_a_rotation_message_is_no_checkpoint():
    """The old key's consent does not pass as a signed head, nor the reverse."""
    lines = rotation_message(ORIGIN, "old", "new").decode().split("\n")
    assert not lines[1].isdecimal()
