"""A log with everything that years bring verifies from its export, by the verifier's file alone."""

import base64
import hashlib
import json
import shutil
import subprocess
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.audit import verify
from appliance.audit.checkpoint import parse_note, signature_lines, with_signatures
from appliance.audit.cosignature import ED25519_COSIGNATURE
from appliance.audit.cosigned import Cosigned, CosignedCheckpoints
from appliance.audit.entry_types import EntryType
from appliance.audit.rotation import rotation_message, short_form
from appliance.audit.signing_keys import Signer
from appliance.audit.timestamps.store import Timestamp, Timestamps
from appliance.audit.verify import ExitCode
from tests.disposed_log import DAY_MS, AgedLog, dispose
from tests.timestamp_authority import TimestampAuthority

WITNESSES = [
    Signer(
        f"w.test/{number}",
        Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32),
        kind=ED25519_COSIGNATURE,
    )
    for number in (1, 2)
]


def content(text):
    """Fields of an entry that names content."""
    digest = hashlib.sha256(text).hexdigest()
    return {"payload_digest": digest, "payload_commitment": "0" * 64, "payload_key": "k"}


def rotate(log, seed):
    """Hand the log over to a new key."""
    old, new = log.signer, Signer(log.signer.name, Ed25519PrivateKey.from_private_bytes(seed * 32))
    previous, successor = short_form(old.verifier_key), short_form(new.verifier_key)
    signature = base64.b64encode(old.sign(rotation_message(old.name, previous, successor))).decode()
    fields = {"previous_key": previous, "key": successor, "signature": signature, "actor": "cli:root"}
    log.append((EntryType.SIGNER_ROTATED, fields))
    log.signer = new


@pytest.fixture
def written(sql_store, signer, tmp_path):
    """
    A log of years: two rotations, of which one is disposed of, content erased on both sides of the border.

    A request whose content was erased begins before the border and ends behind it.
    """
    log = AgedLog(sql_store, signer, DAY_MS)
    log.create_key()
    rotate(log, b"1")
    encrypted = {"content_mode": "encrypted", **content(b"prompt")}
    early = log.begin(1, **encrypted)
    log.end(early, **content(b"answer"))
    erased = {"tenant": "acme", "payloads": 2, "legal_basis": "end of purpose", "actor": "cli:root"}
    log.append((EntryType.ERASURE, {**erased, "requests": (early,)}))
    log.fill(500)
    across = log.begin(2, **encrypted)
    log.fill(200)
    log.end(across, **content(b"answer"))
    log.append((EntryType.ERASURE, {**erased, "requests": (across,)}))
    rotate(log, b"2")
    log.fill(183)
    log.read(1, "export")
    log.sign()
    assert dispose(log).below == 512
    note = log.sign()
    size, text = log.tree.size, parse_note(note).text
    kept = CosignedCheckpoints(sql_store.database)
    for witness in WITNESSES:
        lines = signature_lines(text, [witness], time=log.now_ms // 1000).splitlines(keepends=True)
        cosigned = with_signatures(note, lines)
        kept.save(Cosigned(witness=witness.name, size=size, time=log.now_ms // 1000, note=cosigned))
    authority = TimestampAuthority(tmp_path / "authority")
    Timestamps(sql_store.database).save(Timestamp(size=size, token=authority.stamp(text.encode()), time=1))
    log.fill(3)
    log.sign()
    return log, authority


@pytest.fixture
def bare_python(tmp_path):
    """An interpreter that has `cryptography`, what that needs, and nothing else."""
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    (packages,) = (tmp_path / "bare/lib").glob("python*/site-packages")
    for name in ("cryptography", "cffi", "_cffi_backend", "pycparser"):
        if found := find_spec(name):
            path = Path(found.origin)
            path = path.parent if path.name == "__init__.py" else path
            (packages / path.name).symlink_to(path)
    python = tmp_path / "bare/bin/python"
    for name, is_there in {"cryptography": True, "appliance": False, "sqlalchemy": False}.items():
        done = subprocess.run([python, "-I", "-c", f"import {name}"], capture_output=True, check=False)
        assert (done.returncode == 0) == is_there, name
    return python


def test_a_log_with_everything_verifies_on_a_machine_without_the_product(
    written, signer, export, tmp_path, bare_python
):
    """A disposed range, erased content, rotated keys, two witnesses, a time stamp; given is the first key."""
    log, authority = written
    directory = export(log.store)
    shutil.copyfile(verify.__file__, tmp_path / "verify.py")
    (tmp_path / "log.key").write_text(signer.vkey)
    options = [f"--witness={witness.vkey}" for witness in WITNESSES]
    options += ["--timestamp-cert", str(authority.certificate), "--json", "--key", str(tmp_path / "log.key")]
    done = subprocess.run(
        [bare_python, "-I", str(tmp_path / "verify.py"), str(directory), *options],
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    report = json.loads(done.stdout)
    assert (report["problems"], done.returncode) == ([], ExitCode.ERASED)
    assert report["disposed"]["gone_below"] == 512
    assert len(report["rotations"]) == 2
    assert len(report["witnesses"]) == 2
    assert report["timestamps"]["level"] == "timed"
    assert report["payloads"]["erased"] == 2
    assert report["open_requests"] == report["unknown_keys"] == []
