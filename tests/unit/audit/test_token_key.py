"""A signing key in a PKCS#11 token: it signs, stays there, and is not asked for with a wrong PIN twice."""

import threading
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from appliance.audit import verify
from appliance.audit.checkpoint import verify_checkpoint
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.rotation import rotate_to
from appliance.audit.sealed import SealedHead
from appliance.audit.signing_keys import (
    create_mldsa_key,
    create_signing_key,
    keep_public_keys,
    load_keys,
    load_public_keys,
    load_signing_key,
    refuse_retired,
)
from appliance.audit.token_key import TokenSigningKey
from appliance.audit.verify import ExitCode
from appliance.errors import AuditKeyError, AuditUnavailableError
from appliance.infra.key_location import mldsa_path, parse_key_location
from tests.fakes import until
from tests.tokens import PIN, WRONG, Tokens, forget, use

ORIGIN = "appliance.test/audit"


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    return use(Tokens.make(tmp_path / "softhsm"), monkeypatch)


@pytest.fixture
def place(tokens):
    """A token with one key."""
    tokens.create("log", "audit")
    return parse_key_location(tokens.uri("log", "audit"))


@pytest.fixture
def spied(tokens):
    """The same, by a module that counts logins."""
    tokens.create("log", "audit")
    return parse_key_location(tokens.uri("log", "audit", spied=True))


def test_signature_is_valid_under_the_public_key_of_the_token(place):
    signer = load_signing_key(place, ORIGIN)
    Ed25519PublicKey.from_public_bytes(signer.verifier_key.public_key).verify(signer.sign(b"entry"), b"entry")


def test_private_key_cannot_be_read_from_the_token(tokens, place):
    shown = tokens.tool("log", "--list-objects", "--type", "privkey")
    assert "never extractable" in shown
    assert "sensitive" in shown


def test_key_that_the_token_gives_out_in_clear_is_refused(tokens):
    tokens.create("log")
    pkcs11 = pytest.importorskip("pkcs11")
    library = pkcs11.lib(str(tokens.module))
    with library.get_token(token_label="log").open(rw=True, user_pin=PIN) as session:
        session.create_domain_parameters(
            pkcs11.KeyType.EC_EDWARDS, {pkcs11.Attribute.EC_PARAMS: b"\x13\x0cedwards25519"}, local=True
        ).generate_keypair(
            mechanism=pkcs11.Mechanism.EC_EDWARDS_KEY_PAIR_GEN,
            store=True,
            label="audit",
            private_template={pkcs11.Attribute.EXTRACTABLE: True, pkcs11.Attribute.SENSITIVE: False},
        )
    forget()
    with pytest.raises(AuditKeyError, match="would give out the private key in clear"):
        load_signing_key(parse_key_location(tokens.uri("log", "audit")), ORIGIN)


def test_pin_is_not_read_from_a_file_that_others_can_read(tokens, place):
    tokens.pin.chmod(0o644)
    with pytest.raises(AuditKeyError, match=r"others may read the PIN .*chmod 600"):
        load_signing_key(place, ORIGIN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("token=log", "token=other"), "is there 0 times; the module has log"),
        (("object=audit", "object=other"), "has 0 private and 0 public Ed25519 keys"),
        (("libsofthsm2.so", "missing.so"), "cannot be used"),
        (("pin-source=", "pin-source=/missing"), "no PIN at /missing"),
    ],
)
def test_what_is_missing_is_named_in_one_line(tokens, place, change, words):
    with pytest.raises(AuditKeyError, match=words) as caught:
        load_signing_key(parse_key_location(str(place).replace(*change)), ORIGIN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("pkcs11:token=a;object=b?module-path=/m&pin-value=1", "would show the PIN"),
        ("pkcs11:token=a;object=b?pin-source=/p", "no module-path"),
        ("pkcs11:token=a;object=b?module-path=m.so&pin-source=/p", "absolute path"),
        ("pkcs11:token=a;object=b?module-path=/m&pin-source=file:p", "absolute path"),
        ("pkcs11:token=a?module-path=/m&pin-source=/p", "no object"),
        ("pkcs11:token=a;token=b;object=b?module-path=/m&pin-source=/p", "twice"),
        ("pkcs11:token=a;object=b?module-path=/m&pin-source=|sh", "absolute path"),
    ],
)
def test_uri_without_what_is_needed_is_refused(uri, words):
    with pytest.raises(ValueError, match=words):
        parse_key_location(uri)


def test_uri_is_read_as_rfc_7512_writes_it():
    key = parse_key_location(
        "pkcs11:token=The%20Log;serial=7f;object=audit%3B1?pin-source=file:///etc/pin&module-path=/usr/lib/m.so"
    )
    assert (key.token, key.serial, key.object) == ("The Log", "7f", "audit;1")
    assert (str(key.pin), str(key.module)) == ("/etc/pin", "/usr/lib/m.so")


def test_wrong_pin_is_tried_once_by_all_starts_together(tokens, spied):
    """The token counts wrong PINs, so that a gateway in a restart loop cannot lock it."""
    tokens.write_pin(WRONG)
    before = tokens.logins()
    with pytest.raises(AuditKeyError, match="refused the PIN"):
        load_signing_key(spied, ORIGIN)
    for _ in range(3):
        with pytest.raises(AuditKeyError, match="no PIN is tried"):
            load_signing_key(spied, ORIGIN)
    assert tokens.logins() == before + 1
    tokens.write_pin(PIN)
    tokens.tool("log", "--list-objects")
    load_signing_key(spied, ORIGIN)


def test_key_signs_again_once_a_lost_token_is_back(tokens, place):
    signer = load_signing_key(place, ORIGIN)
    tokens.lose()
    for _ in range(2):
        with pytest.raises(AuditUnavailableError, match="the token log"):
            signer.sign(b"entry")
    tokens.restore()
    Ed25519PublicKey.from_public_bytes(signer.verifier_key.public_key).verify(signer.sign(b"entry"), b"entry")


def test_session_that_broke_is_reopened_once_within_one_signature(tokens, spied):
    pkcs11 = pytest.importorskip("pkcs11")
    signer = load_signing_key(spied, ORIGIN)
    pkcs11.lib(str(spied.module)).reinitialize()  # as the restart of a token does: every session ends
    before = tokens.logins()
    signer.sign(b"entry")
    assert tokens.logins() == before + 1


def test_pin_that_the_token_refused_is_not_tried_at_later_signatures(tokens, spied, monkeypatch):
    """Also with a token that does not report wrong PINs."""
    pkcs11 = pytest.importorskip("pkcs11")
    monkeypatch.setattr(
        pkcs11, "TokenFlag", type("Silent", (), dict.fromkeys(pkcs11.TokenFlag.__members__, 0))
    )
    signer = load_signing_key(spied, ORIGIN)
    tokens.write_pin(WRONG)
    pkcs11.lib(str(spied.module)).reinitialize()
    before = tokens.logins()
    for _ in range(4):
        with pytest.raises(AuditUnavailableError, match="refused the PIN"):
            signer.sign(b"entry")
    assert tokens.logins() == before + 1
    tokens.write_pin(PIN)
    signer.sign(b"entry")


def test_wrong_signature_is_not_used(tokens, place):
    """The public half under the label belongs to another private key."""
    tokens.generate("log", "other")
    tokens.tool("log", "--delete-object", "--type", "pubkey", "--label", "audit")
    tokens.tool("log", "--delete-object", "--type", "privkey", "--label", "other")
    pkcs11 = pytest.importorskip("pkcs11")
    library = pkcs11.lib(str(place.module))
    library.reinitialize()
    with library.get_token(token_label="log").open(rw=True, user_pin=PIN) as session:
        (public,) = session.get_objects({pkcs11.Attribute.LABEL: "other"})
        public[pkcs11.Attribute.LABEL] = "audit"
    with pytest.raises(AuditKeyError, match="wrong signature"):
        load_signing_key(place, ORIGIN)


def test_public_key_is_known_without_the_token(tokens, place, tmp_path):
    kept = tmp_path / "data" / "audit.vkey"
    with pytest.raises(AuditKeyError, match="appliance audit key"):
        load_public_keys(place, ORIGIN, kept)
    signer = load_signing_key(place, ORIGIN)
    keep_public_keys(place, signer, kept)
    tokens.lose()
    assert load_public_keys(place, ORIGIN, kept) == signer.verifier_keys
    tokens.restore()
    other = parse_key_location(tokens.uri("log", "successor"))
    with pytest.raises(AuditKeyError, match="does not have the public half"):
        load_public_keys(other, ORIGIN, kept)


@pytest.fixture
def rotate(sql_store, sealed_path, clock, tmp_path):
    def rotate_(place, to, **changed):
        given = {
            "store": sql_store,
            "place": place,
            "to": to,
            "origin": ORIGIN,
            "retired": tmp_path / "audit.retired",
            "sealed": SealedHead(sealed_path),
            "gateway": "gateway",
            "actor": "cli:root",
            "clock": clock,
        }
        return rotate_to(**(given | changed))

    return rotate_


@pytest.fixture
def write(sql_store, open_log):
    async def write_(place):
        async with open_log(sql_store, signed_by=load_signing_key(place, ORIGIN)) as log:
            for _ in range(3):
                await log.append(EntryType.AUDIT_READ, actor="cli:root", operation="tail")

    return write_


def exported(store, directory, first_vkey, last_vkey):
    """The report of the independent verifier, which is given the first key alone."""
    export_log(store, directory, vkey=last_vkey)
    return verify.verify_export(directory, verify.parse_keys(first_vkey), None)


@pytest.mark.parametrize("post_quantum", [False, True], ids=["ed25519", "ed25519+mldsa"])
async def test_log_is_handed_from_file_to_token_to_token_to_file(
    tokens, rotate, write, sql_store, tmp_path, post_quantum
):
    """Each time the verifier follows from the first key over the whole log, and the old key is refused."""
    tokens.create("log", "audit-1", "audit-2")
    first, last = tmp_path / "audit.key", tmp_path / "new.key"
    in_tokens = [parse_key_location(tokens.uri("log", name)) for name in ("audit-1", "audit-2")]
    create_signing_key(first)
    if post_quantum:
        create_mldsa_key(mldsa_path(first))
    vkey = load_signing_key(first, ORIGIN).vkey
    await write(first)
    trusted = [vkey]
    places = [first, *in_tokens, last]
    for number, (place, to) in enumerate(pairwise(places)):
        rotated = rotate(place, to)
        assert rotated.retired[0] == place
        with pytest.raises(AuditKeyError, match="handed over"):
            refuse_retired(load_signing_key(place, ORIGIN), tmp_path / "audit.retired")
        await write(to)
        report = exported(sql_store, tmp_path / f"export{number}", "\n".join(trusted), rotated.signer.vkey)
        assert (report.exit_code, report.problems) == (ExitCode.VALID, [])
        assert len(rotated.signer.signers) == 1 + post_quantum
        if post_quantum:
            # Entries name such a key by its hash, so an auditor has to be given each.
            trusted.append(rotated.signer.vkey)


@pytest.mark.parametrize("failing", ["append", "save_checkpoint"])
async def test_interrupted_handover_keeps_the_old_key_from_signing_and_is_completed(
    tokens, place, rotate, write, sql_store, sealed_path, tmp_path, failing, monkeypatch
):
    old = tmp_path / "audit.key"
    create_signing_key(old)
    vkey = load_signing_key(old, ORIGIN).vkey
    await write(old)

    def fail(*_arguments, **_more):
        raise AuditUnavailableError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(sql_store, failing, fail)
        with pytest.raises(AuditUnavailableError):
            rotate(old, place)
    with pytest.raises(AuditKeyError, match="handed over"):
        refuse_retired(load_signing_key(old, ORIGIN), tmp_path / "audit.retired")
    rotated = rotate(old, place)
    await write(place)
    report = exported(sql_store, tmp_path / "export", vkey, rotated.signer.vkey)
    assert (report.exit_code, report.problems) == (ExitCode.VALID, [])
    assert report.entries_by_type["signer.rotated"] == 1


async def test_second_machine_follows_the_handover_for_its_sealed_head(
    place, rotate, write, sql_store, sealed_path, tmp_path
):
    """It retires the old key there, too, and writes no second entry."""
    old = tmp_path / "audit.key"
    create_signing_key(old)
    vkey = load_signing_key(old, ORIGIN).vkey
    await write(old)
    other = tmp_path / "other.head"
    other.write_bytes(sealed_path.read_bytes())
    rotate(old, place)
    await write(place)
    rotated = rotate(old, place, sealed=SealedHead(other), retired=tmp_path / "other.retired")
    with pytest.raises(AuditKeyError, match="handed over"):
        refuse_retired(load_signing_key(old, ORIGIN), tmp_path / "other.retired")
    verify_checkpoint(other.read_text(), rotated.signer.verifier_key)
    await write(place)
    report = exported(sql_store, tmp_path / "export", vkey, rotated.signer.vkey)
    assert (report.exit_code, report.problems) == (ExitCode.VALID, [])
    assert report.entries_by_type["signer.rotated"] == 1


async def test_key_that_was_retired_does_not_come_back(tokens, place, rotate, write, tmp_path):
    old = tmp_path / "audit.key"
    create_signing_key(old)
    await write(old)
    rotate(old, place)
    with pytest.raises(AuditKeyError, match="has signed this log before"):
        rotate(place, old)


async def test_checkpoints_pause_while_the_token_is_lost_and_entries_stay_durable(
    tokens, place, sql_store, open_log
):
    """The failure is reported, and the next checkpoint after the token is back covers everything."""
    signer = load_signing_key(place, ORIGIN)
    async with open_log(sql_store, signed_by=signer, checkpoint_entries=1, checkpoint_seconds=0.01) as log:
        tokens.lose()
        receipt = await log.append(EntryType.AUDIT_READ, actor="cli:root", operation="tail")
        await until(lambda: log.state().checkpoint_failure)
        assert "the token log" in log.state().checkpoint_failure
        assert log.state().failure is None
        assert sql_store.head().size == receipt.index + 1
        tokens.restore()
        await until(lambda: log.state().checkpoint_size > receipt.index)
    checkpoint = verify_checkpoint(sql_store.latest_checkpoint().note, *signer.verifier_keys)
    assert checkpoint.size > receipt.index


async def test_event_loop_does_not_sign(place, sql_store, open_log, monkeypatch):
    signer, threads, sign = load_signing_key(place, ORIGIN), set(), TokenSigningKey.sign

    def observed(self, data):
        threads.add(threading.current_thread().name)
        return sign(self, data)

    monkeypatch.setattr(TokenSigningKey, "sign", observed)
    async with open_log(sql_store, signed_by=signer, checkpoint_entries=1) as log:
        await log.append(EntryType.AUDIT_READ, actor="cli:root", operation="tail")
    assert threads == {"audit-writer"}


def test_bundle_key_in_a_token_has_the_name_it_is_given(place):
    assert load_keys(place, mldsa_path(place), "example.com/releases").name == "example.com/releases"
