"""The checks of the signing key and of the newest entries of the audit log, on real logs."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.cli.preflight import log_integrity
from appliance.cli.preflight.check import CheckResult, Inquiry
from appliance.infra.data_directory import locate
from tests.audit_log import intent, open_log, outcome, prepare, settings_for

REQUESTS = 20


@pytest.fixture
async def inquiry(tmp_path):
    """A log of about forty entries, closed as a gateway closes it."""
    prepare(tmp_path)
    settings = settings_for(tmp_path)
    with closing(SqlAuditStore(locate(settings).database_url)) as store:
        async with open_log(settings, store) as guarded:
            for number in range(REQUESTS):
                await guarded.log.append(EntryType.REQUEST_INTENT, **intent(f"r-{number}"))
                await guarded.log.append(EntryType.REQUEST_OUTCOME, **outcome(f"r-{number}"))
    return Inquiry(settings=settings, settings_file=None, clock=lambda: 0.0)


def asked(inquiry):
    return {check.id: check for check in log_integrity.check_log(inquiry)}


def change(inquiry, *statements):
    """Change the database as an attacker with write access would: drop the triggers first."""
    with closing(sqlite3.connect(inquiry.installation.directory / "audit.db")) as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            database.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            database.execute(statement)
        database.commit()


def test_unchanged_log_passes(inquiry):
    """Key and entries pass, and the tree is rebuilt."""
    checks = asked(inquiry)
    assert [check.result for check in checks.values()] == [CheckResult.OK, CheckResult.OK]
    assert "the signed one" in checks["audit.newest"].seen


def test_an_entry_that_was_changed_is_found(inquiry):
    """Its hash differs."""
    change(inquiry, "UPDATE audit_leaves SET leaf = replace(leaf, 'r-3', 'r-4') WHERE idx = 8")
    assert asked(inquiry)["audit.newest"].result is CheckResult.FAIL


def test_an_entry_that_was_changed_with_its_hash_is_found(inquiry):
    """The tree then differs from the signed one, also if the entry is older than those that are read."""
    change(inquiry, "UPDATE audit_leaves SET leaf_hash = zeroblob(32) WHERE idx = 2")
    check = asked(replace(inquiry, entries=5))["audit.newest"]
    assert check.result is CheckResult.FAIL
    assert "not those that were signed" in check.seen


def test_a_log_that_was_cut_off_is_found(inquiry):
    """The sealed head has its size."""
    with closing(SqlAuditStore(inquiry.installation.database_url)) as store:
        subtrees = b"".join(leaf.leaf_hash for leaf in store.leaves(0, 1))
    change(
        inquiry,
        "DELETE FROM audit_leaves WHERE idx >= 1",
        "DELETE FROM audit_checkpoints",
        f"UPDATE audit_head SET size = 1, root = x'{subtrees.hex()}', frontier = x'{subtrees.hex()}'",
    )
    check = asked(inquiry)["audit.newest"]
    assert check.result is CheckResult.FAIL
    assert "1 entries" in check.seen


def test_a_checkpoint_by_another_key_is_found(inquiry, tmp_path):
    """The key of the directory is not the log's."""
    inquiry.installation.signing_key.unlink()
    log_key = prepare(tmp_path).signing_key
    assert log_key == inquiry.installation.signing_key
    checks = asked(inquiry)
    assert checks["audit.key"].result is CheckResult.OK
    assert checks["audit.newest"].result is CheckResult.FAIL


def test_missing_key_is_a_failure_if_there_is_a_log(inquiry):
    """A start would create another key, and another log."""
    inquiry.installation.signing_key.unlink()
    assert [check.result for check in asked(inquiry).values()] == [CheckResult.FAIL, CheckResult.SKIPPED]


def test_a_key_others_may_read_is_a_failure(inquiry):
    """A start refuses it."""
    inquiry.installation.signing_key.chmod(0o644)
    assert asked(inquiry)["audit.key"].result is CheckResult.FAIL


def test_before_the_first_start_there_is_none(tmp_path):
    """The first start creates it."""
    checks = asked(Inquiry(settings=settings_for(tmp_path), settings_file=None, clock=lambda: 0.0))
    assert [check.result for check in checks.values()] == [CheckResult.OK, CheckResult.SKIPPED]
    assert list(tmp_path.iterdir()) == []


def test_only_the_end_of_a_log_is_read(inquiry):
    """The line names the command that reads all of it."""
    check = asked(replace(inquiry, entries=5))["audit.newest"]
    assert check.result is CheckResult.OK
    assert check.seen.startswith("5 of ")
    assert "audit verify" in check.seen
