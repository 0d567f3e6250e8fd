"""
A disposal on PostgreSQL dies at every statement, with its connection or with the whole server.

The promise: whatever it had done by then, an auditor finds nothing; run again, it completes.
"""

import shutil
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from appliance.audit import verify
from appliance.audit.disposal import store as disposal_store
from appliance.audit.disposal.disposing import Disposing
from appliance.audit.export import export_log
from appliance.audit.store import SqlAuditStore
from appliance.errors import AuditUnavailableError
from appliance.infra.schema import upgrade_database
from tests.audit_log import prepare, signer_in
from tests.consistency import assert_consistent
from tests.disposed_log import DAY_MS, aged, plan_of, record
from tests.postgres import private_postgres

STEP = 5
"""Statements from one death to the next, in one test: others begin at the ones between."""


@pytest.fixture(scope="module")
def server():
    with private_postgres() as server:
        yield server


@pytest.fixture
def template(server, tmp_path, monkeypatch):
    """A database with a signed entry that disposes of three tiles, in three transactions."""
    monkeypatch.setattr(disposal_store, "TILES", 1)
    prepare(tmp_path)
    url = server.new_database()
    upgrade_database(url)
    with closing(SqlAuditStore(url)) as store:
        log = aged(store, signer_in(tmp_path), old=1000, accepted=2, step_ms=DAY_MS)
        assert record(log, plan_of(log)).below == 768
    return url.rpartition("/")[2]


@contextmanager
def _before_each_statement(act):
    """Call `act`, with a number, before each statement and each commit."""
    numbers = iter(range(1_000_000))

    def count(*_what):
        act(next(numbers))

    for name in ("before_cursor_execute", "commit"):
        event.listen(Engine, name, count)
    yield
    for name in ("before_cursor_execute", "commit"):
        event.remove(Engine, name, count)


def _dispose(store):
    disposing = Disposing(store=store)
    if disposal := disposing.recorded():
        list(disposing.carry_out(disposal))


def _verify(store, directory: Path):
    signer = signer_in(directory)
    shutil.rmtree(directory / "export", ignore_errors=True)
    export_log(store, directory / "export", vkey=signer.vkey)
    report = verify.verify_export(directory / "export", verify.parse_key(signer.vkey), None)
    assert report.problems == []
    assert report.exit_code in {verify.ExitCode.VALID, verify.ExitCode.ERASED}
    return report


@pytest.mark.parametrize(
    ("dies", "first"), [*(("connection", first) for first in range(STEP)), ("server", 1)]
)
def test_a_disposal_that_dies_anywhere_leaves_a_sound_log_and_completes_when_run_again(
    server, template, tmp_path, dies, first
):
    total = _statements(server, template)
    assert total > 40
    seen = set()
    for at in range(first, total, STEP):
        server.execute(f"DROP DATABASE IF EXISTS killed; CREATE DATABASE killed TEMPLATE {template}")
        _interrupt(server, at, dies)
        with closing(SqlAuditStore(server.url_of("killed"))) as store:
            report = _verify(store, tmp_path)
            seen.add((report.gone_below, report.left_entries))
            _dispose(store)
            report = _verify(store, tmp_path)
            assert (report.gone_below, report.left_entries, report.kept_entries) == (768, 0, 3)
            assert_consistent(store)
    assert seen >= {(0, 0), (768, 768), (768, 512), (768, 256)}


def _statements(server, template):
    """Count those of a disposal that nothing interrupts."""
    counted = []
    server.execute(f"CREATE DATABASE counted TEMPLATE {template}")
    with closing(SqlAuditStore(server.url_of("counted"))) as store, _before_each_statement(counted.append):
        _dispose(store)
    server.execute("DROP DATABASE counted")
    return len(counted)


def _interrupt(server, at, dies):
    def die(number):
        if number == at and dies == "server":
            server.kill()
        elif number == at:
            server.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = 'killed'"
            )

    with (
        closing(SqlAuditStore(server.url_of("killed"))) as store,
        _before_each_statement(die),
        pytest.raises(AuditUnavailableError),
    ):
        _dispose(store)
    if dies == "server":
        server.start()
