"""The live log is verified by the auditor's verifier."""

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from appliance.audit.entry_types import EntryType
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.audit.verification import SCRATCH, LogVerification, Stage
from appliance.audit.verify import ExitCode
from appliance.infra.settings import AuditSettings
from tests.fakes import until

ENTRIES = 600


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[AuditLog]:
    create_signing_key(tmp_path / "audit.key")
    settings = AuditSettings(checkpoint_seconds=0.05)
    with closing(SqlAuditStore(url(tmp_path))) as store:
        async with AuditLog.open(
            store=store,
            signer=load_signing_key(tmp_path / "audit.key", settings.origin),
            settings=settings,
            sealed_head_path=tmp_path / "audit.head",
            clock=time.time,  # noqa: TID251 - a composition root
            version="test",
        ) as opened:
            hold = {"actor": "test", "tenant": "acme", "reason": "a test"}
            await asyncio.gather(*(opened.append(EntryType.HOLD_PLACED, **hold) for _ in range(ENTRIES)))
            await until(lambda: opened.state().checkpoint_size >= ENTRIES, 30)
            yield opened


def url(directory: Path) -> str:
    return f"sqlite:///{directory / 'audit.db'}"


def verification(directory: Path, *, keep_free_bytes: int = 0) -> LogVerification:
    signer = load_signing_key(directory / "audit.key", AuditSettings().origin)
    return LogVerification(
        database_url=url(directory),
        scratch=directory,
        vkey=lambda: signer.vkey,
        witnesses=(),
        keep_free_bytes=keep_free_bytes,
        clock=time.time,  # noqa: TID251 - as above
    )


async def ended(verifying: LogVerification) -> None:
    await until(lambda: not verifying.progress.is_running, 60)


async def test_a_whole_log_is_valid(log, tmp_path):
    """A second one is not begun while the first runs."""
    verifying = verification(tmp_path)
    assert verifying.progress.stage is Stage.NEVER
    assert verifying.start()
    assert not verifying.start()
    await ended(verifying)
    progress = verifying.progress
    assert (progress.stage, progress.verdict) == (Stage.DONE, ExitCode.VALID)
    assert progress.size == progress.copied == progress.entries >= ENTRIES
    assert progress.root == log.state().root
    assert progress.problems == ()


async def test_an_altered_entry_is_found(log, tmp_path):
    with closing(sqlite3.connect(tmp_path / "audit.db")) as database, database:
        for (trigger,) in database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall():
            database.execute(f"DROP TRIGGER {trigger}")
        (leaf,) = database.execute("SELECT leaf FROM audit_leaves WHERE idx = 300").fetchone()
        altered = leaf.replace(b"acme", b"acne")
        assert altered != leaf
        database.execute("UPDATE audit_leaves SET leaf = ? WHERE idx = 300", (altered,))
    verifying = verification(tmp_path)
    verifying.start()
    await ended(verifying)
    assert verifying.progress.verdict is ExitCode.INVALID
    assert verifying.progress.problems


async def test_an_entry_longer_than_any_can_be_ends_it_as_well(log, tmp_path):
    """A log that cannot be copied is reported; no caller waits for a verdict."""
    with closing(sqlite3.connect(tmp_path / "audit.db")) as database, database:
        for (trigger,) in database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall():
            database.execute(f"DROP TRIGGER {trigger}")
        database.execute("UPDATE audit_leaves SET leaf = ? WHERE idx = 300", (bytes(2**16),))
    verifying = verification(tmp_path)
    verifying.start()
    await ended(verifying)
    assert verifying.progress.stage is Stage.FAILED
    assert "entry 300 has 65536 bytes" in verifying.progress.failure


async def test_failed_verification_ends_and_can_be_restarted(log, tmp_path):
    verifying = verification(tmp_path)

    def broken() -> str:
        raise RuntimeError("a defect")

    verifying._vkey = broken
    for _ in range(2):
        assert verifying.start()
        await ended(verifying)
        assert verifying.progress.failure == "RuntimeError: a defect"


async def test_a_full_disk_ends_it_without_a_verdict(log, tmp_path):
    """The failure says nothing about the log."""
    verifying = verification(tmp_path, keep_free_bytes=2**62)
    verifying.start()
    await ended(verifying)
    assert (verifying.progress.stage, verifying.progress.verdict) == (Stage.FAILED, None)
    assert "disk space" in verifying.progress.failure


async def test_it_is_cancelled_when_the_gateway_stops(log, tmp_path):
    verifying = verification(tmp_path)
    verifying.start()
    await verifying.stop()
    assert verifying.progress.verdict is None


async def test_the_copy_is_made_in_the_directory_named_and_nothing_stays(log, tmp_path, monkeypatch):
    """Not in `/tmp`, which is small in containers; what a crash left is removed as well."""
    left = tmp_path / f"{SCRATCH}left"
    left.mkdir()
    (left / "entries").write_bytes(b"x")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "no-such-place"))
    verifying, seen = verification(tmp_path), []
    vkey = verifying._vkey

    def while_copying() -> str:
        seen.extend(tmp_path.glob(f"{SCRATCH}*"))
        return vkey()

    verifying._vkey = while_copying
    verifying.start()
    await ended(verifying)
    assert verifying.progress.verdict is ExitCode.VALID
    assert len(seen) == 1
    assert seen != [left]
    assert not list(tmp_path.glob(f"{SCRATCH}*"))
