"""The signing key is made once, and refused if other accounts can read it."""

import os

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from appliance.audit import mldsa
from appliance.audit.checkpoint import parse_verifier_key, parse_verifier_keys
from appliance.audit.signing_keys import (
    Signer,
    create_mldsa_key,
    create_signing_key,
    is_open_to_others,
    load_signing_key,
    mldsa_path,
    prepare_mldsa_key,
)
from appliance.errors import AuditKeyError


def test_a_new_key_is_private_and_signs(tmp_path):
    """Mode 0600 from the first moment, and the same key every time it is loaded."""
    path = tmp_path / "audit.key"
    create_signing_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    first, second = load_signing_key(path, "log.test/a"), load_signing_key(path, "log.test/a")
    assert first.vkey == second.vkey
    assert first.sign(b"x") == second.sign(b"x")
    assert parse_verifier_key(first.vkey) == first.verifier_key


def test_an_existing_key_is_never_replaced(tmp_path):
    """Overwriting the key would orphan every checkpoint it signed."""
    path = tmp_path / "audit.key"
    create_signing_key(path)
    content = path.read_bytes()
    with pytest.raises(AuditKeyError, match="never replaced"):
        create_signing_key(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    """The message says what to do about it."""
    path = tmp_path / "audit.key"
    create_signing_key(path)
    path.chmod(mode)
    with pytest.raises(AuditKeyError, match="chmod 600"):
        load_signing_key(path, "log.test/a")


@pytest.mark.parametrize(
    ("mode", "owner", "reader", "refused"),
    [
        (0o440, 0, 10001, False),  # a Secret in a pod with an fsGroup
        (0o640, 0, 10001, False),
        (0o400, 0, 10001, False),
        (0o460, 0, 10001, True),
        (0o444, 0, 10001, True),
        (0o440, 10001, 10001, True),
        (0o440, 0, 0, True),
        (0o600, 10001, 10001, False),
    ],
)
def test_group_may_read_a_key_that_root_owns(monkeypatch, mode, owner, reader, refused):
    """Kubernetes has no other way to give a key to a user that is not root."""
    monkeypatch.setattr(os, "geteuid", lambda: reader)
    assert is_open_to_others(os.stat_result((mode, 0, 0, 1, owner, 10001, 1, 0, 0, 0))) is refused


@pytest.mark.parametrize(
    "content", [b"", b"not a key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_a_damaged_key_is_refused(tmp_path, content):
    """For any content, the error is AuditKeyError."""
    path = tmp_path / "audit.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(AuditKeyError, match="no usable private key"):
        load_signing_key(path, "log.test/a")


def test_another_kind_of_key_is_refused(tmp_path):
    """Checkpoints are Ed25519; another key would only fail later."""
    path = tmp_path / "audit.key"
    path.touch(mode=0o600)
    key = generate_private_key(SECP256R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(AuditKeyError, match="Ed25519"):
        load_signing_key(path, "log.test/a")


def test_a_missing_key_or_directory_is_named(tmp_path):
    """An operator reads the path and what to do."""
    with pytest.raises(AuditKeyError, match="no signing key"):
        load_signing_key(tmp_path / "audit.key", "log.test/a")
    with pytest.raises(AuditKeyError, match="cannot write"):
        create_signing_key(tmp_path / "missing" / "audit.key")
    with pytest.raises(AuditKeyError):
        load_signing_key(tmp_path, "log.test/a")


def test_a_log_cannot_have_a_name_that_breaks_its_notes():
    """The origin is checked where it becomes a key name."""
    with pytest.raises(AuditKeyError, match="cannot name a log"):
        Signer("my log", Ed25519PrivateKey.generate())


def test_post_quantum_key_signs_as_well(tmp_path):
    """Made when it is wanted, private, loaded wherever the signing key is, and never dropped silently."""
    path = tmp_path / "audit.key"
    create_signing_key(path)
    alone = load_signing_key(path, "log.test/a")
    prepare_mldsa_key(path, wanted=False)
    assert not mldsa_path(path).exists()
    for _ in range(2):
        prepare_mldsa_key(path, wanted=True)
    assert mldsa_path(path) == tmp_path / "audit-mldsa.key"
    assert mldsa_path(path).stat().st_mode & 0o777 == 0o600
    both = load_signing_key(path, "log.test/a")
    assert both.vkey.startswith(f"{alone.vkey}\n")
    assert parse_verifier_keys(both.vkey) == both.verifier_keys
    with pytest.raises(AuditKeyError, match=r"audit\.post_quantum is off"):
        prepare_mldsa_key(path, wanted=False)


def test_a_post_quantum_key_has_the_same_checks(tmp_path):
    """Readable by others, of another kind, or damaged: refused, with its path."""
    path = tmp_path / "audit.key"
    create_signing_key(path)
    create_mldsa_key(mldsa_path(path))
    mldsa_path(path).chmod(0o640)
    with pytest.raises(AuditKeyError, match=r"chmod 600 .*audit-mldsa\.key"):
        load_signing_key(path, "log.test/a")
    mldsa_path(path).chmod(0o600)
    mldsa_path(path).write_bytes(path.read_bytes())
    with pytest.raises(AuditKeyError, match="must be ML-DSA-44"):
        load_signing_key(path, "log.test/a")


def test_a_library_without_post_quantum_keys_is_named(tmp_path, monkeypatch):
    """One line that says what to install; nothing else changes."""
    monkeypatch.setattr(mldsa, "IS_THERE", False)
    path = tmp_path / "audit.key"
    create_signing_key(path)
    prepare_mldsa_key(path, wanted=False)
    assert load_signing_key(path, "log.test/a").sign(b"x")
    with pytest.raises(AuditKeyError, match="47 or newer"):
        prepare_mldsa_key(path, wanted=True)
    mldsa_path(path).touch(mode=0o600)
    with pytest.raises(AuditKeyError, match="47 or newer"):
        load_signing_key(path, "log.test/a")
