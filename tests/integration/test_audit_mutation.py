"""
The verifier detects a change of any byte of an export.

The verifier is an auditor's: one copied file, in an empty directory, run by a Python that is
in isolated mode (`-I`).  It therefore also shows that the file needs nothing of ours.
"""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from appliance.audit import verify
from appliance.audit.content.payloads import Payload, SqlPayloadStore
from appliance.audit.content.sealing import Part, place, seal
from appliance.audit.entry import new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log, export_receipt
from appliance.audit.log import AuditLog
from appliance.audit.mldsa import supports_mldsa
from appliance.audit.signing_keys import create_mldsa_key, create_signing_key, load_signing_key, mldsa_path
from appliance.audit.store import SqlAuditStore
from appliance.cli import cli
from appliance.infra.settings import AuditSettings

SETTINGS = AuditSettings()
WITNESS = "witness.test/w1"
REFUSED = {verify.ExitCode.UNUSABLE, verify.ExitCode.INVALID}
# Runs inside the isolated interpreter: tries every mutation and prints those that went unnoticed.
ALL_MUTATIONS = """
import contextlib, io, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import verify
arguments, files, masks = json.loads(sys.argv[2]), json.loads(sys.argv[3]), (0x01, 0x20, 0x80)
stride, refused = int(sys.argv[4]), json.loads(sys.argv[5])

def run():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(verify.main(arguments))

def tries(content):
    for at in range(0, len(content), stride):
        for mask in masks:
            yield f"byte {at} ^ {mask}", content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]
        yield f"without byte {at}", content[:at] + content[at + 1 :]
    yield "one byte more", content + b"x"

assert run() == 0, "what was not changed must be valid"
count, unnoticed = 0, []
for name in files:
    path = Path(name)
    original = path.read_bytes()
    for what, content in tries(original):
        path.write_bytes(content)
        count += 1
        if run() not in refused:
            unnoticed.append(f"{name}: {what}")
    path.write_bytes(original)
assert run() == 0, "everything was put back"
print(json.dumps([count, unnoticed]))
"""


@dataclass(frozen=True)
class Evidence:
    """An export for an auditor, and the verifier alone in a directory."""

    directory: Path
    export: Path
    vkey: str

    @property
    def verifier(self) -> Path:
        return self.directory / "alone" / "verify.py"


async def _write(directory: Path, store: SqlAuditStore, requests: int) -> None:
    async with AuditLog.open(
        store=store,
        signer=load_signing_key(directory / "audit.key", SETTINGS.origin),
        settings=SETTINGS,
        sealed_head_path=directory / "audit.head",
        clock=lambda: 1_800_000_000.0,
        version="test",
    ) as log:
        for number in range(requests):
            common = {"request_id": f"r{number}", "tenant": "t", "key_id": "k", "route": "/v1", "model": "m"}
            intent = {"stream": False, "client": "loopback", "body_bytes": 1, "content_mode": "none"}
            await log.append(EntryType.REQUEST_INTENT, **common, **intent)
            outcome = {"outcome": "completed", "status": 200, "duration_ms": 1}
            await log.append(EntryType.REQUEST_OUTCOME, **common, **outcome)


def _evidence(directory: Path, requests: int) -> Evidence:
    create_signing_key(directory / "audit.key")
    store = SqlAuditStore(f"sqlite:///{directory}/audit.db")
    asyncio.run(_write(directory, store, requests))
    vkey = load_signing_key(directory / "audit.key", SETTINGS.origin).vkey
    export = directory / "export"
    export_log(store, export, vkey=vkey)
    leaf, proof = export_receipt(store, 1)
    (directory / "entry.leaf").write_bytes(leaf)
    (directory / "entry.tlog-proof").write_text(proof)
    store.close()
    (directory / "alone").mkdir()
    shutil.copy(verify.__file__, directory / "alone" / "verify.py")
    return Evidence(directory=directory, export=export, vkey=vkey)


async def _serve_one_with_content(directory: Path, store: SqlAuditStore, payloads: SqlPayloadStore) -> None:
    """One request whose body and answer are kept, encrypted."""
    request_id = new_entry_id(1_800_000_000_000, bytes(10))
    common = {"request_id": request_id, "tenant": "t", "key_id": "k", "route": "/v1", "model": "m"}
    async with AuditLog.open(
        store=store,
        signer=load_signing_key(directory / "audit.key", SETTINGS.origin),
        settings=SETTINGS,
        sealed_head_path=directory / "audit.head",
        clock=lambda: 1_800_000_000.0,
        version="test",
    ) as log:
        for entry_type, part, fields in (
            (
                EntryType.REQUEST_INTENT,
                Part.REQUEST,
                {"stream": False, "client": "loopback", "body_bytes": 1, "content_mode": "encrypted"},
            ),
            (
                EntryType.REQUEST_OUTCOME,
                Part.RESPONSE,
                {"outcome": "completed", "status": 200, "duration_ms": 1},
            ),
        ):
            where = place(SETTINGS.origin, request_id, part)
            sealed, commitment = seal(b"words " * 20, where, bytes(32), random_bytes=bytes)
            payloads.add(
                [
                    Payload(
                        request_id=request_id,
                        part=part,
                        tenant="t",
                        key_id="t.x",
                        sealed=sealed,
                        time="2027-01-15T08:00:00.000Z",
                    )
                ]
            )
            named = {"payload_commitment": commitment, "payload_digest": sealed.digest, "payload_key": "t.x"}
            await log.append(entry_type, **common, **fields, **named)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """A log signed with both kinds of key, cosigned by a witness, with kept content."""
    if not supports_mldsa():
        pytest.skip("this cryptography has no ML-DSA-44, so a log signed with it cannot be made")
    directory = tmp_path_factory.mktemp("whole")
    create_signing_key(directory / "audit.key")
    create_mldsa_key(mldsa_path(directory / "audit.key"))
    url = f"sqlite:///{directory}/audit.db"
    with closing(SqlAuditStore(url)) as store, closing(SqlPayloadStore(url)) as payloads:
        asyncio.run(_serve_one_with_content(directory, store, payloads))
    vkey = load_signing_key(directory / "audit.key", SETTINGS.origin).vkey
    (directory / "log.keys").write_text(vkey)
    home, head, data = directory / "witness", directory / "head.txt", ["--data", str(directory)]
    _run_appliance(
        "witness", "init", home, "--name", WITNESS, "--log", directory / "log.keys", "--post-quantum"
    )
    (directory / "witness.keys").write_text(_run_appliance("witness", "key", home))
    known = json.dumps([{"name": WITNESS, "key": str(directory / "witness.keys")}])
    environment = {"APPLIANCE_AUDIT__WITNESSES": known, "APPLIANCE_AUDIT__POST_QUANTUM": "true"}
    _run_appliance("witness", "export-head", head, *data, env=environment)
    _run_appliance("witness", "cosign", home, head)
    _run_appliance("witness", "import", head, *data, env=environment)
    export = directory / "export"
    _run_appliance("export", export, *data, env=environment)
    (directory / "alone").mkdir()
    shutil.copy(verify.__file__, directory / "alone" / "verify.py")
    return Evidence(directory=directory, export=export, vkey=vkey)


def _run_appliance(*words: str | Path, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(cli, ["audit", *map(str, words)], env=env)
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """A log of three entries: few enough to change every byte."""
    return _evidence(tmp_path_factory.mktemp("small"), 1)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """A log of more than two tiles."""
    return _evidence(tmp_path_factory.mktemp("larger"), 300)


def _files(evidence: Evidence) -> list[Path]:
    """Every file of the export; the key in it is a convenience that an auditor does not use."""
    files = sorted(path for path in evidence.export.rglob("*") if path.is_file())
    return [path for path in files if path.name not in {"vkey", "verify.py"}]


def _mutate_all(
    evidence: Evidence,
    arguments: list[str],
    files: list[Path],
    *,
    stride: int = 1,
    refused: Iterable[int] = REFUSED,
) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALL_MUTATIONS, evidence.verifier.parent]
        + [json.dumps([str(item) for item in items]) for items in (arguments, files)]
        + [str(stride), json.dumps([int(code) for code in refused])],
        cwd=evidence.verifier.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count, unnoticed = json.loads(done.stdout)
    return count, unnoticed


def _run(evidence: Evidence, *arguments: str) -> int:
    command = [sys.executable, "-I", evidence.verifier.name, *arguments]
    done = subprocess.run(command, cwd=evidence.verifier.parent, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode


def test_the_verifier_runs_alone(small):
    """One file in an empty directory, and nothing of ours can be imported: the log is valid."""
    assert [path.name for path in small.verifier.parent.iterdir()] == ["verify.py"]
    nothing = [sys.executable, "-I", "-c", "import verify"]
    assert subprocess.run(nothing, cwd=small.directory, capture_output=True, check=False).returncode != 0
    assert _run(small, str(small.export), "--key", small.vkey) == verify.ExitCode.VALID


def test_every_byte_of_a_small_log_counts(small):
    """Each byte of every file of the export, flipped in three ways, removed or added, is refused."""
    files = _files(small)
    size = sum(path.stat().st_size for path in files)
    count, unnoticed = _mutate_all(small, [str(small.export), "--key", small.vkey], files)
    assert (count, unnoticed) == (4 * size + len(files), [])
    assert size > 1000


def test_every_byte_of_a_receipt_and_its_leaf_counts(small):
    """The same for one receipt and the entry it is for."""
    receipt, leaf = small.directory / "entry.tlog-proof", small.directory / "entry.leaf"
    count, unnoticed = _mutate_all(
        small, [str(receipt), "--leaf", str(leaf), "--key", small.vkey], [receipt, leaf]
    )
    assert unnoticed == []
    assert count > 2000


def test_every_byte_of_the_key_counts(small):
    """A mistyped key is refused, whether or not it is well-formed."""
    key = small.directory / "alone" / "auditor.key"
    key.write_text(small.vkey)
    try:
        _count, unnoticed = _mutate_all(small, [str(small.export), "--key", str(key)], [key])
    finally:
        key.unlink()
    # White space around a key is no part of it.
    assert [line for line in unnoticed if "more" not in line] == []


def test_cosignatures_post_quantum_signatures_and_content_count_too(whole):
    """Some bytes of every file that only a larger installation has: each change is refused."""
    files = _files(whole)
    folders = {path.relative_to(whole.export).parts[0] for path in files}
    assert folders == {"checkpoint", "payloads", "tile", "witnessed"}
    keys = ["--key", str(whole.directory / "log.keys"), "--witness", str(whole.directory / "witness.keys")]
    count, unnoticed = _mutate_all(
        whole,
        [str(whole.export), *keys],
        files,
        stride=29,
        refused=[*REFUSED, verify.ExitCode.UNWITNESSED],
    )
    (cosigned,) = (path for path in files if path.parent.name == "witnessed")
    assert [line for line in unnoticed if not _is_in_the_logs_own_signature(line, cosigned)] == []
    assert count > 500


def _is_in_the_logs_own_signature(line: str, cosigned: Path) -> bool:
    """
    Whether a change is in what a cosigned checkpoint repeats of the log's own signatures.

    They are judged in `checkpoint`; here the witness's signature vouches for the text.
    """
    name, _, change = line.rpartition(": ")
    found = re.search(r"byte (\d+)", change)
    content = cosigned.read_bytes()
    begin, end = content.index(b"\n\n") + 2, content.index(f"\u2014 {WITNESS} ".encode())
    return name == str(cosigned) and found is not None and begin <= int(found[1]) < end


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_to_a_larger_log_is_refused(larger, data):
    """Any byte of any file replaced by any other, verified with the auditor's command."""
    path = data.draw(st.sampled_from(_files(larger)))
    original = path.read_bytes()
    at = data.draw(st.integers(0, len(original) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda number: number != original[at]))
    path.write_bytes(original[:at] + bytes([value]) + original[at + 1 :])
    try:
        assert _run(larger, str(larger.export), "--key", larger.vkey) in REFUSED
    finally:
        path.write_bytes(original)


@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_missing_or_swapped_file_is_refused(larger, data):
    """A missing file, or two exchanged ones, are detected like a changed byte."""
    files = _files(larger)
    path = data.draw(st.sampled_from(files))
    other = data.draw(st.sampled_from([file for file in files if file != path]))
    first, second = path.read_bytes(), other.read_bytes()
    path.unlink()
    try:
        assert _run(larger, str(larger.export), "--key", larger.vkey) in REFUSED
        path.write_bytes(second)
        other.write_bytes(first)
        assert _run(larger, str(larger.export), "--key", larger.vkey) in REFUSED
    finally:
        path.write_bytes(first)
        other.write_bytes(second)
