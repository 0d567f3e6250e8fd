"""The checks of the database; those on a real PostgreSQL are in tests/contract."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from appliance.audit.store import SqlAuditStore
from appliance.cli.preflight.audit_database import (
    SeenDatabase,
    check_database,
    judge_drift,
    judge_reachable,
    judge_rights,
    judge_schema,
    log_is_current,
)
from appliance.cli.preflight.check import CheckResult
from tests.unit.cli.preflight.test_preflight_files import inquiry_in

SERVER = SeenDatabase(
    name="PostgreSQL 15.10",
    major=15,
    empty=False,
    current=True,
    lacking=(),
    excessive=(),
    read_only=False,
    drift_seconds=0.1,
)
FILE = replace(SERVER, name="SQLite 3.40.1", major=None, drift_seconds=None)


def results(inquiry):
    checks = tuple(check_database(inquiry))
    assert [check.id for check in checks] == [subject.id for subject in check_database.subjects]
    return [check.result for check in checks]


def test_before_the_first_start_there_is_none(tmp_path):
    """The check creates none."""
    inquiry = inquiry_in(tmp_path)
    assert results(inquiry) == [CheckResult.OK, CheckResult.SKIPPED, CheckResult.SKIPPED, CheckResult.SKIPPED]
    assert not log_is_current(inquiry)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_is_up_to_date(tmp_path):
    """Reachable, current, writable; it uses this machine's clock."""
    SqlAuditStore(f"sqlite:///{tmp_path / 'audit.db'}").close()
    inquiry = inquiry_in(tmp_path)
    assert results(inquiry) == [CheckResult.OK, CheckResult.OK, CheckResult.OK, CheckResult.SKIPPED]
    assert log_is_current(inquiry)


def test_check_does_not_upgrade_an_empty_database(tmp_path):
    """The next start upgrades it, after a backup."""
    with closing(sqlite3.connect(tmp_path / "audit.db")) as database:
        database.execute("CREATE TABLE x (y)")
    inquiry = inquiry_in(tmp_path)
    assert results(inquiry)[1] is CheckResult.WARN
    assert not log_is_current(inquiry)
    with closing(sqlite3.connect(tmp_path / "audit.db")) as database:
        assert database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [("x",)]


def test_malformed_database_file_is_a_failure(tmp_path):
    """With the driver's own message."""
    (tmp_path / "audit.db").write_bytes(b"this is no database, and never was one" * 40)
    check = next(iter(check_database(inquiry_in(tmp_path))))
    assert check.result is CheckResult.FAIL
    assert "not a database" in check.seen


def test_a_server_that_does_not_answer_is_a_failure(tmp_path):
    """No server listens on port 1."""
    inquiry = inquiry_in(tmp_path, audit={"database_url": "postgresql://gateway@127.0.0.1:1/audit"})
    assert results(inquiry) == [
        CheckResult.FAIL,
        CheckResult.SKIPPED,
        CheckResult.SKIPPED,
        CheckResult.SKIPPED,
    ]


def test_a_url_that_cannot_be_used_is_a_failure(tmp_path):
    """Before any connection."""
    assert results(inquiry_in(tmp_path, audit={"database_url": "mysql://db/audit"}))[0] is CheckResult.FAIL


def test_an_old_server_is_a_warning():
    """15 is the oldest tested version."""
    assert judge_reachable(SERVER).result is CheckResult.OK
    assert judge_reachable(replace(SERVER, major=13)).result is CheckResult.WARN


def test_outdated_tables_on_postgresql_are_a_failure():
    """The gateway's role cannot create them, so a start would fail; SQLite is upgraded at start."""
    assert judge_schema(SERVER).result is CheckResult.OK
    assert judge_schema(replace(SERVER, current=False, empty=True)).result is CheckResult.FAIL
    assert "upgrade-database" in judge_schema(replace(SERVER, current=False)).todo
    assert judge_schema(replace(FILE, current=False)).result is CheckResult.WARN


def test_a_gateway_may_append_and_nothing_else():
    """Missing rights are a failure, excessive ones a warning."""
    assert judge_rights(SERVER).result is CheckResult.OK
    assert judge_rights(replace(SERVER, lacking=("INSERT on audit_leaves",))).result is CheckResult.FAIL
    assert judge_rights(replace(SERVER, excessive=("DELETE on audit_leaves",))).result is CheckResult.WARN
    assert judge_rights(replace(SERVER, read_only=True)).result is CheckResult.FAIL


@pytest.mark.parametrize(
    ("seconds", "result"),
    [
        (None, CheckResult.SKIPPED),
        (0.2, CheckResult.OK),
        (-2.0, CheckResult.WARN),
        (9.0, CheckResult.FAIL),
        (-9.0, CheckResult.FAIL),
    ],
)
def test_clocks_agree(seconds, result):
    """Leases and heartbeats depend on both clocks."""
    assert judge_drift(seconds).result is result
