"""Disposal on both databases, by the command that an operator runs, and on the way to another database."""

import json
import time

import pytest
from sqlalchemy.exc import DatabaseError

from appliance.audit import verify
from appliance.audit.disposal.disposing import Disposing
from appliance.audit.entry import format_time
from appliance.audit.export import export_log
from appliance.audit.migrate import copy_log
from appliance.audit.recovery import recover
from appliance.audit.store import SqlAuditStore
from appliance.errors import AuditUnavailableError, AuditVerificationError
from appliance.infra.schema import grants, upgrade_database
from tests.audit_log import ORIGIN, prepare, signer_in
from tests.command import run_command
from tests.consistency import assert_consistent
from tests.disposed_log import DAY_MS, aged, dispose, plan_of, record
from tests.forwarding import Collected, judge_stream, make_forwarder


@pytest.fixture
def directory(tmp_path):
    prepare(tmp_path / "appliance")
    return tmp_path / "appliance"


@pytest.fixture
def log(directory, url, open_store):
    return aged(open_store(url), signer_in(directory), old=1000, step_ms=DAY_MS)


def _report(store, directory, name):
    export_log(store, directory / name, vkey=signer_in(directory).vkey)
    return verify.verify_export(directory / name, verify.parse_key(signer_in(directory).vkey), None)


def test_disposed_entries_are_gone_and_the_log_goes_on(log, directory):
    assert dispose(log).below == 768
    assert len(log.store.leaves(0, 768)) == 2
    assert_consistent(log.store)
    log.fill(600)
    note = log.sign()
    assert recover(log.store, note, signer_in(directory).verifier_key, "gateway").tree.size == log.tree.size
    report = _report(log.store, directory, "export")
    assert (report.problems, report.gone_below) == ([], 768)


def test_only_what_was_disposed_of_can_be_deleted(log, url, execute):
    dispose(log)
    for index in (768, log.tree.size - 1):
        with pytest.raises(DatabaseError, match="write-once"):
            execute(url, f"DELETE FROM audit_leaves WHERE idx = {index}")
    execute(url, "DELETE FROM audit_leaves WHERE idx = 0")


def test_a_gateways_role_cannot_dispose(directory, postgres, open_store):
    """On PostgreSQL the owner's role does; a gateway has no DELETE on leaves, and does not move the mark."""
    url = postgres.new_database()
    upgrade_database(url)
    database = url.rpartition("/")[2]
    postgres.execute(f"CREATE ROLE disposer LOGIN; {grants('disposer')}", database=database)
    narrow = open_store(postgres.url_of(database, role="disposer"))
    log = aged(open_store(url), signer_in(directory), old=1000, step_ms=DAY_MS)
    disposal = record(log, plan_of(log))
    with pytest.raises(AuditUnavailableError, match="permission denied"):
        list(Disposing(store=narrow).carry_out(disposal))
    assert len(narrow.leaves(0, 768)) == 768
    list(Disposing(store=log.store).carry_out(disposal))
    assert len(narrow.leaves(0, 768)) == 2
    assert narrow.disposal() == disposal


def test_a_log_with_disposed_entries_moves_to_another_database(log, directory, tmp_path, postgres, url):
    dispose(log)
    there = postgres.new_database()
    upgrade_database(there)
    back = f"sqlite:///{tmp_path / 'back.db'}"
    copy_log(url, there, progress=lambda _done, _total: None)
    copy_log(there, back, progress=lambda _done, _total: None)
    for number, each in enumerate((there, back)):
        store = SqlAuditStore(each)
        try:
            assert store.disposal() == log.store.disposal()
            assert store.hashes(1, 0, 10_000) == log.store.hashes(1, 0, 10_000)
            report = _report(store, directory, f"copy{number}")
            assert (report.problems, report.kept_entries) == ([], 2)
        finally:
            store.close()


def test_a_disposal_is_completed_before_the_log_moves(log, tmp_path, url, monkeypatch):
    monkeypatch.setattr("appliance.audit.disposal.store.TILES", 1)
    disposing, disposal = Disposing(store=log.store), record(log, plan_of(log))
    steps = disposing.carry_out(disposal)
    for _ in range(4):  # three tiles with what is kept of them; the first is deleted
        next(steps)
    steps.close()
    with pytest.raises(AuditVerificationError, match="complete the disposal first"):
        copy_log(url, f"sqlite:///{tmp_path / 'first.db'}", progress=lambda _done, _total: None)
    list(disposing.carry_out(disposal))
    copy_log(url, f"sqlite:///{tmp_path / 'second.db'}", progress=lambda _done, _total: None)


async def test_a_new_siem_gets_the_log_from_behind_the_disposal_and_can_prove_it(log, directory, tmp_path):
    dispose(log)
    log.fill(20)
    log.sign()
    collector, stream = Collected(), tmp_path / "stream"
    await make_forwarder(log.store, collector).forward(until_sent=True)
    stream.write_bytes(collector.stream)
    code, report = judge_stream(stream, signer_in(directory).vkey)
    assert (code, report["problems"]) == (0, [])
    assert report["start"] > 768
    assert report["end"] == log.tree.size


# The command.


@pytest.fixture
def appliance(tmp_path, monkeypatch, directory):
    """Run `appliance audit dispose`; return its exit status and all it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*words, **environment):
        given = {"APPLIANCE_AUDIT__ORIGIN": ORIGIN, **environment}
        done = run_command("audit", "dispose", "--data", directory, *words, **given)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def old_log(directory, open_store):
    """A log of real age: its newest entries are of the last days."""
    store = open_store(f"sqlite:///{directory / 'audit.db'}")
    began_ms = int(time.time() * 1000) - 1190 * DAY_MS  # noqa: TID251 - the command's clock
    return aged(store, signer_in(directory), old=1000, step_ms=DAY_MS, began_ms=began_ms)


def test_the_command_shows_first_and_removes_only_with_yes(appliance, old_log, directory):
    before = format_time(old_log.now_ms - 200 * DAY_MS)
    code, said = appliance("--before", before)
    assert code == 0, said
    assert "entries 0 to 767" in said
    assert "nothing was removed: pass --yes" in said
    size = old_log.store.head().size
    assert len(old_log.store.leaves(0, size)) == size
    code, said = appliance("--before", before, "--yes", "--wait", "0", "--basis", "our rule 7")
    assert code == 1
    assert "no checkpoint covers" in said
    assert len(old_log.store.leaves(0, size)) == size
    old_log.sign()
    code, said = appliance("--yes", "--wait", "0")
    assert (code, "disposed of the first 768 entries" in said) == (0, True), said
    assert len(old_log.store.leaves(0, 768)) == 2
    entry = json.loads(old_log.store.leaves(size, size + 1)[0].leaf)
    assert (entry["legal_basis"], entry["actor"].startswith("cli:")) == ("our rule 7", True)
    assert _report(old_log.store, directory, "export").problems == []


def test_the_command_takes_its_age_from_the_settings(appliance, old_log):
    code, said = appliance()
    assert (code, "set audit.dispose_after_days" in said) == (1, True)
    code, said = appliance(APPLIANCE_AUDIT__DISPOSE_AFTER_DAYS="200")
    assert code == 0, said
    assert "can be disposed of" in said
    code, said = appliance(APPLIANCE_AUDIT__DISPOSE_AFTER_DAYS="100")
    assert (code, "183" in said) == (1, True)


def test_under_the_two_person_rule_only_the_age_of_the_settings_disposes(appliance, old_log):
    """No second person approves a command, so no one person chooses what goes."""
    two = {"APPLIANCE_AUDIT__TWO_PERSON": "true"}
    later, earlier = (format_time(old_log.now_ms - days * DAY_MS) for days in (200, 500))
    for given in (two, {**two, "APPLIANCE_AUDIT__DISPOSE_AFTER_DAYS": "400"}):
        code, said = appliance("--before", later, "--yes", **given)
        assert (code, "audit.two_person is on" in said) == (1, True), said
    assert "audit.disposed" not in {leaf.type for leaf in old_log.store.leaves(0, 10_000)}
    code, said = appliance("--before", earlier, **given)
    assert (code, "can be disposed of" in said) == (0, True), said
    code, said = appliance(**given)
    assert (code, "can be disposed of" in said) == (0, True), said


def test_the_command_keeps_183_days(appliance, old_log):
    code, said = appliance("--before", "2999-01-01", "--yes")
    assert (code, "every entry is kept for 183 days" in said) == (1, True)
